"""Check teachers by tag: a teacher that nobody needs does not run and changes no bit; losses in float64."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from safetensors.torch import load_file

from mkd.kinds.routed.route_setup import replicas_in_step
from tests.tiny_models import make_model
from tests.train.dense_teachers import Recorded, dense_loss, make_files
from tests.train.invariance import NOT_AHEAD, NUM_PACKS, PEERS, SP, Layout
from tests.train.routed_layouts import ONE_EACH, TAGS, record_routed, run_layout, write_config

SETTINGS = [dict(temperature=2.0, divergence="forward_kl")] * 2
TWO_OF_MATH = ({"tags": ["math"], "weight": 1}, {"weight": 3, "tags": ["code", "law", "math"]})
LAYOUTS = (
    Layout("one process"),
    Layout("one process, micro-batch 4", micro=4),
    Layout("TP2 + SP", 2, tp=2, flags=SP),
    Layout("CP2", 2, cp=2),
    Layout("PP2, teachers ahead", 2, pp=2),
    Layout("PP2, not ahead", 2, pp=2, flags=NOT_AHEAD),
    Layout("PP2 VPP2", 2, pp=2, vp=2),
    Layout("DP2", 2),
    Layout("DP2, teachers over 2 peers", 2, flags=PEERS[2]),
)
DEFAULT = ("one process", "PP2, teachers ahead")
EVERY = [one if one.name in DEFAULT else pytest.param(one, marks=pytest.mark.slow) for one in LAYOUTS]
LAWS = {"law": 1, "math": 5, "code": 2}
CASES = [  # teachers, weights of tags, micro-batch, kd-ratio
    pytest.param(*case, marks=[] if number in (1, 6) else pytest.mark.slow)
    for number, case in enumerate(product((ONE_EACH, TWO_OF_MATH), ({}, LAWS), (1, 4), (0.5, 1.0)))
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("routed"))


@pytest.fixture(scope="module")
def single(files, ranks):
    (result,) = ranks.run(run_layout, 1, LAYOUTS[0], write_config(files), True, files / "single")
    return result, load_file(files / "single" / "gradients" / "model.safetensors")


@pytest.mark.parametrize("layout", EVERY, ids=lambda layout: layout.name)
def test_teachers_that_do_not_run_change_no_bit(layout, files, ranks, single):
    of_peers = ({"residency": "peers", "peers": 2},) * 2 if "peers" in layout.name else ({}, {})
    flags = () if "peers" in layout.name else layout.flags
    layout = Layout(**{**vars(layout), "flags": flags})
    config = write_config(files, *(a | b for a, b in zip(ONE_EACH, of_peers, strict=True)))
    found = {}
    for runs_all in (True, False):
        every = ranks.run(run_layout, layout.ranks, layout, config, runs_all, files / str(runs_all))
        gradients = load_file(files / str(runs_all) / "gradients" / "model.safetensors")
        found[runs_all] = every, gradients
    (whole, of_all), (routed, of_routed) = found[True], found[False]
    for name, gradient in of_all.items():
        assert torch.equal(gradient, of_routed[name]), name
        assert (gradient - single[1][name]).abs().max() <= 1e-5 * single[1][name].abs().max()
    for key in ("sums", "held_out", "step", "grad_norm"):
        assert [one[key] for one in whole] == [one[key] for one in routed], key
    assert routed[0]["sums"]["loss"] == pytest.approx(single[0]["sums"]["loss"], rel=1e-5)
    parts = sum(sum(one["counts"][0]) for one in whole) // 2
    ran = [sum(one["counts"][0][number] for one in routed) for number in range(2)]
    assert parts % (NUM_PACKS // layout.micro) == 0
    assert ran == [parts // 2] * 2
    assert [sum(one["counts"][1][number] for one in routed) for number in range(2)] == [parts // 2] * 2


SPLIT = ({"tags": ["code"]}, {"tags": ["law", "math"]})  # dealt: code code | code law | math math | math math
IN_STEP = {  # what both teachers are, beside their tags -> forwards of each, of 8
    "experts of the second over 2 ranks": (({}, {"expert_model_parallel_size": 2}), (3, 6)),
    "layers over 2 peers": (({"residency": "peers", "peers": 2},) * 2, (4, 6)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if "experts" in one else pytest.mark.slow) for one in IN_STEP]
)
def test_replicas_that_exchange_a_teacher_run_it_together(name, files, ranks):
    """One rank needs the first teacher while the other needs the second: nothing waits for ever."""
    settings, wanted = IN_STEP[name]
    make_model(files / "experts", "qwen3_moe", seed=6, vocab_size=320)
    settings = [one | tags for one, tags in zip(settings, SPLIT, strict=True)]
    settings[1]["hf"] = str(files / "experts")
    config, found = write_config(files, *settings), []
    for runs_all in (True, False):
        every = ranks.run(run_layout, 2, Layout("DP2", 2), config, runs_all, files / str(runs_all))
        found.append((every, load_file(files / str(runs_all) / "gradients" / "model.safetensors")))
    (whole, of_all), (routed, of_routed) = found
    assert all(torch.equal(gradient, of_routed[name]) for name, gradient in of_all.items())
    assert [one["step"] for one in whole] == [one["step"] for one in routed]
    assert tuple(sum(one["counts"][0][number] for one in routed) for number in range(2)) == wanted


@pytest.mark.parametrize(
    ("row", "replicas", "block", "together"),
    [(1, 4, 1, 1), (1, 4, 2, 2), (2, 4, 2, 1), (2, 4, 4, 2), (4, 2, 2, 1), (1, 8, 8, 8), (2, 8, 8, 4)],
)
def test_replicas_in_step(row, replicas, block, together):
    """`together` neighbouring replicas run a teacher together."""
    for replica in range(replicas):
        first = replica // together * together
        expected = tuple(range(first, first + together))
        assert replicas_in_step(row, replicas, block, replica) == expected


@pytest.mark.parametrize(("teachers", "weights", "micro", "ratio"), CASES)
def test_loss_and_gradient_are_those_of_a_plain_loop_over_tags(teachers, weights, micro, ratio, files, ranks):
    layout = Layout("one", micro=micro, flags=("--kd-ratio", str(ratio)))
    config = write_config(files, *teachers, tag_weights=[f"{tag}={value}" for tag, value in weights.items()])
    ((recorded, heads, head_gradient, (sums, by_tag, by_teacher), tags),) = ranks.run(
        record_routed, 1, layout, config
    )
    recorded = [Recorded(*one) for one in recorded]
    total, of_tag = plain(recorded, heads, tags, teachers, weights, ratio)
    head, loss, _ = total
    assert sums["loss"] / sums["num_loss_tokens"] == pytest.approx(loss, rel=1e-5)
    assert sum(one.loss for one in recorded) == pytest.approx(loss, rel=1e-5)
    assert (head_gradient - head).abs().max() <= 1e-5 * head.abs().max()
    for tag in TAGS:
        assert by_tag[f"tokens/{tag}"][0] == of_tag[tag]["tokens"]
        assert math.prod((by_tag[f"kd_loss/{tag}"][0], 1 / by_tag[f"kd_loss/{tag}"][1])) == pytest.approx(
            of_tag[tag]["kd"], rel=1e-5
        )
        ce, tokens = by_tag[f"ce/{tag}"]
        assert ratio == 1 or ce / tokens == pytest.approx(of_tag[tag]["ce"], rel=1e-5)
    parts = [by_teacher[f"teacher_weight/{name}"][0] * one[0] / one[1] for name, one in divided(by_teacher)]
    assert sum(parts) == pytest.approx(sums["kd"] / sums["num_loss_tokens"], rel=1e-9)


def divided(by_teacher):
    for key, value in by_teacher.items():
        if key.startswith("kd_loss/"):
            yield key.removeprefix("kd_loss/"), value


def plain(recorded, heads, tags, teachers, weights, ratio):
    """Return ((head's gradient, loss, gradients of hidden states), tag -> its tokens, kd and ce), float64."""
    head = heads[0].double().requires_grad_()
    tokens = {number: 0.0 for number in range(len(TAGS))}
    for one, own in zip(recorded, tags, strict=True):
        for number, mask in zip(own, one.mask.view(one.num_packs, -1), strict=True):
            tokens[number] += mask.sum().item()
    everything = sum(tokens.values())
    loss, found = 0.0, {tag: {"tokens": tokens[n], "kd": 0.0, "ce": 0.0} for n, tag in enumerate(TAGS)}
    for one, own in zip(recorded, tags, strict=True):
        hidden = one.hidden.double().requires_grad_()
        share = sum(
            of_tag(one, hidden, [head, *heads[1:]], number, own, teachers, weights, ratio, tokens, found)
            for number in set(own)
        )
        share.backward()
        loss += share.item()
        assert (one.gradient - hidden.grad).abs().max() <= 1e-5 * hidden.grad.abs().max() + 1e-12
    assert everything > 0
    return (head.grad, loss, None), found


def of_tag(one, hidden, heads, number, own, teachers, weights, ratio, tokens, found):
    """Return the tag's part of the loss of one micro-batch, and add its figures to `found`."""
    tag, everything = TAGS[number], sum(tokens.values())
    mask = one.mask * torch.tensor([n == number for n in own]).repeat_interleave(len(one.mask) // len(own))
    part = Recorded(one.hidden, one.teacher_hiddens, one.labels, mask, one.num_packs, 0.0, one.gradient)
    of = torch.tensor([[teacher.get("weight", 1.0) * (tag in teacher["tags"])] for teacher in teachers])
    shares = (of / of.sum()).double().expand(2, len(own))
    nothing = torch.zeros(2, len(own))
    kd = dense_loss(part, hidden, heads, shares, SETTINGS, 1.0)[0]
    ce = dense_loss(part, hidden, heads, nothing, SETTINGS, 0.0)[0]
    found[tag]["kd"] += kd.item() / tokens[number]
    found[tag]["ce"] += ce.item() / tokens[number]
    scale = weights[tag] / sum(weights.values()) / tokens[number] if weights else 1 / everything
    return (1 - ratio) * ce / everything + ratio * scale * kd
