"""Check the objective of several teachers: loss, gradients and reports of an engine vs. dense float64."""

from __future__ import annotations

import pytest
import torch

from mkd.losses.dense_reference import dense_kd
from tests.losses.objectives import objective_of
from tests.train.dense_teachers import (
    VOCAB_SIZES,
    Recorded,
    dense_loss,
    dense_weights,
    logits_of,
    make_files,
    record_layout,
    write_config,
)
from tests.train.invariance import Layout

RATIO, SHARES = 0.5, (0.25, 0.75)  # `Layout.argv`'s ratio; weights 1 and 3
DEFAULT = dict(temperature=2.0, divergence="forward_kl")
WEIGHTS = ({"weight": 1}, {"weight": 3})
OWN = (
    {"weight": 1, "divergence": "jsd", "jsd_beta": 0.3},
    {"weight": 3, "divergence": "reverse_kl", "temperature": 1.5},
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("objective"))


def run(ranks, files, *flags, teachers=({}, {})):
    """Return `record` of the fixed global batch, two packs per micro-batch."""
    ((recorded, *more),) = ranks.run(
        record_layout, 1, Layout("one", micro=2, flags=flags), write_config(files, *teachers)
    )
    return [Recorded(*one) for one in recorded], *more


def assert_equal_dense(result, expect):
    """Compare with `expect(recorded, hidden, heads)`, the loss summed over the tokens of a micro-batch."""
    recorded, heads, head_gradient, _, _ = result
    tokens = sum(one.mask.sum().item() for one in recorded)
    head = heads[0].double().requires_grad_()
    for one in recorded:
        hidden = one.hidden.double().requires_grad_()
        loss = expect(one, hidden, [head, *heads[1:]]) / tokens
        loss.backward()
        assert one.loss == pytest.approx(loss.item(), rel=1e-5, abs=1e-9)
        assert (one.gradient - hidden.grad).abs().max() <= 1e-5 * hidden.grad.abs().max()
    assert (head_gradient - head.grad).abs().max() <= 1e-5 * head.grad.abs().max()
    assert head.grad.abs().max() > 1e-4


@pytest.mark.parametrize("ratio", [RATIO, 1.0])
@pytest.mark.parametrize(
    "teachers, settings",
    [
        (WEIGHTS, [DEFAULT, DEFAULT]),
        (
            OWN,
            [
                dict(temperature=2.0, divergence="jsd", jsd_beta=0.3),
                dict(temperature=1.5, divergence="reverse_kl"),
            ],
        ),
    ],
    ids=["common", "own"],
)
def test_sum_of_weighted_divergences(teachers, settings, ratio, files, ranks):
    result = run(ranks, files, "--kd-ratio", str(ratio), teachers=teachers)
    parts = []

    def expect(recorded, hidden, heads):
        weights = torch.tensor(SHARES).double()[:, None].expand(2, recorded.num_packs)
        loss, of_teachers = dense_loss(recorded, hidden, heads, weights, settings, ratio)
        parts.append(of_teachers)
        return loss

    assert_equal_dense(result, expect)
    sums = result[3]
    for i, name in enumerate(("teacher", "second")):
        kd, weight = (sum(float(part[i][j]) for part in parts) for j in (0, 1))
        assert sums.teachers[name].kd == pytest.approx(kd, rel=1e-5)
        assert sums.teachers[name].weight == pytest.approx(weight, rel=1e-6)


@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
def test_average_is_the_divergence_from_the_mean_of_probabilities(divergence, files, ranks):
    flags = ("--teacher-combination", "average", "--kd-divergence", divergence)
    size, temperature = min(VOCAB_SIZES), 2.0  # the ids that all models have

    def expect(recorded, hidden, heads):
        mean = sum(
            share * (logits_of(states, head, size) / temperature).softmax(1)
            for share, states, head in zip(SHARES, recorded.teacher_hiddens, heads[1:], strict=True)
        )
        student = logits_of(hidden, heads[0], VOCAB_SIZES[0])
        sizes = dict(student_vocab_size=VOCAB_SIZES[0], teacher_vocab_size=size)
        settings = dict(temperature=temperature, divergence=divergence, kd_ratio=RATIO)
        objective = objective_of(**sizes, **settings)
        return dense_kd(student, mean.log() * temperature, recorded.labels, recorded.mask, objective).loss

    result = run(ranks, files, *flags, teachers=WEIGHTS)
    assert result[3].teachers.keys() == {"average"}
    assert_equal_dense(result, expect)


@pytest.mark.parametrize(
    "metric, temperature", [("ce", 0.05), ("entropy", 0.05), ("confidence", 0.01), ("select", 1.0)]
)
def test_what_teachers_say_of_a_pack_weighs_them(metric, temperature, files, ranks):
    flags, teachers, shares = ("--teacher-weighting", metric), WEIGHTS, SHARES
    flags += ("--teacher-weighting-temperature", str(temperature))
    if metric == "select":
        flags, teachers, shares = ("--teacher-combination", "select"), ({}, {}), None
    result = run(ranks, files, *flags, teachers=teachers)
    recorded, heads, _, sums, found = result
    weights = [dense_weights(one, heads, metric, shares, temperature) for one in recorded]
    for ours, dense, one in zip(found, weights, recorded, strict=True):
        has_tokens = one.mask.view(one.num_packs, -1).sum(1) > 0
        torch.testing.assert_close(ours[:, has_tokens].double(), dense[:, has_tokens], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(ours.sum(0), torch.ones(one.num_packs))
    spread = torch.cat(weights, dim=1)[0]
    assert spread.max() - spread.min() > (0.9 if metric == "select" else 0.01), "packs differ"
    in_order = iter(weights)

    def expect(one, hidden, heads):
        return dense_loss(one, hidden, heads, next(in_order), [DEFAULT, DEFAULT], RATIO)[0]

    assert_equal_dense(result, expect)
    total = sum(one.kd for one in sums.teachers.values()) / sums.num_loss_tokens
    assert sums.kd_mean == pytest.approx(total, rel=1e-12)
