"""Several teachers as one: the mean of their probabilities, against dense float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from mkd.losses import HeadInput, fused_linear_kd
from mkd.losses.dense_reference import dense_kd
from mkd.losses.fused_linear import mixture_logits
from tests.losses.objectives import objective_of

SHARES = (0.2, 0.5, 0.3)
VOCAB, WIDTH, ROWS = 37, 40, 11
SETTINGS = dict(student_vocab_size=VOCAB, teacher_vocab_size=VOCAB - 2, kd_ratio=0.6)


def tensors(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=dtype)

    teachers = [(normal(ROWS, width), normal(WIDTH, width)) for width in (6, 8, 5)]
    labels = torch.randint(0, VOCAB - 2, (ROWS,), generator=generator)
    mask = (torch.rand(ROWS, generator=generator) < 0.7).to(dtype)
    return normal(ROWS, 7), normal(WIDTH, 7), teachers, labels, mask


def dense_mixture(teachers, temperature):
    logits = [(hidden @ weight.T)[:, : VOCAB - 2] / temperature for hidden, weight in teachers]
    mean = sum(share * one.softmax(dim=1) for share, one in zip(SHARES, logits, strict=True))
    return torch.nn.functional.pad(mean.log() * temperature, (0, WIDTH - VOCAB + 2))


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_probabilities_are_the_weighted_mean(temperature):
    *_, teachers, _, _ = tensors()
    logits = [hidden @ weight.T for hidden, weight in teachers]
    found = mixture_logits(logits, SHARES, temperature, VOCAB - 2, None)[:, : VOCAB - 2]
    expected = dense_mixture(teachers, temperature)[:, : VOCAB - 2]
    assert found.amax(dim=1).abs().max() <= temperature * math.log(len(SHARES) / min(SHARES)), (
        "the largest are near 0"
    )
    for logits in (found, expected):
        logits -= logits.logsumexp(dim=1, keepdim=True)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def sharded(settings):
    """Return values and the student's gradients of fused_linear_kd on this rank's columns."""
    rank, size = dist.get_rank(), dist.get_world_size()
    hidden, weight, teachers, labels, mask = tensors()
    hidden.requires_grad_()
    own = weight.chunk(size)[rank].clone().requires_grad_()
    output = fused_linear_kd(
        HeadInput(hidden, own),
        [HeadInput(states, whole.chunk(size)[rank]) for states, whole in teachers],
        labels,
        mask,
        objective_of(**SETTINGS, **settings),
        tp_group=dist.group.WORLD,
        teacher_shares=SHARES,
        block_rows=4,
    )
    output.loss.backward()
    return output.loss.detach(), output.kd, hidden.grad, own.grad


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "settings", [dict(temperature=2.5), dict(divergence="jsd"), dict(divergence="reverse_kl")], ids=str
)
def test_loss_and_gradients(size, settings, ranks):
    hidden, weight, teachers, labels, mask = tensors()
    hidden.requires_grad_(), weight.requires_grad_()
    teacher = dense_mixture(teachers, settings.get("temperature", 1.0))
    expected = dense_kd(hidden @ weight.T, teacher, labels, mask, objective_of(**SETTINGS, **settings))
    expected.loss.backward()
    results = ranks.run(sharded, size, settings)
    for loss, kd, of_hidden, _ in results:
        torch.testing.assert_close(loss, expected.loss.detach(), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(kd, expected.kd.detach(), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(of_hidden, hidden.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        torch.cat([of_weight for *_, of_weight in results]), weight.grad, rtol=1e-10, atol=1e-12
    )
