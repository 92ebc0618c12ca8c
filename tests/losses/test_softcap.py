"""Losses of soft-capped logits, against the same losses of heads that make these logits directly."""

from __future__ import annotations

import pytest
import torch

from mkd.losses import HeadInput, fused_linear_kd, vocab_parallel_topk_kd
from mkd.losses.scores import token_scores
from mkd.xtoken.fused import fused_chunk_kd
from tests.losses.objectives import objective_of
from tests.losses.test_fused_linear import BOTH, problem
from tests.losses.test_vocab_parallel import assert_close, values
from tests.xtoken.chunk_cases import random_case
from tests.xtoken.test_fused import arguments

CAP, OTHER_CAP = 2.0, 3.0


def capped(hidden, weight, cap=CAP):
    return torch.tanh(hidden @ weight.T / cap) * cap


def direct(logits):
    """Return a head whose product is `logits`, exactly."""
    return HeadInput(logits, torch.eye(logits.shape[1], dtype=logits.dtype))


def assert_equal(found, wanted, inputs, tolerance=1e-12):
    """Compare two losses with all values, and their gradients by `inputs`."""
    for name, value in values(wanted).items():
        assert_close(values(found)[name], value, tolerance)
    gradients = [torch.autograd.grad(3.0 * one.loss, inputs) for one in (found, wanted)]
    for ours, theirs in zip(*gradients, strict=True):
        assert_close(ours, theirs, tolerance)


@pytest.mark.parametrize("fp32_logits", [False, True])
def test_fused_head_with_several_teachers(fp32_logits):
    hidden, weight, teacher_hidden, teacher_weight, labels, mask = problem()
    hidden.requires_grad_(), weight.requires_grad_()
    objective = objective_of(kd_ratio=0.4, temperature=1.7, with_ce_metric=True, **BOTH)
    others = dict(tp_group=None, teacher_shares=(0.3, 0.7))
    caps, teachers = (OTHER_CAP, None), ((teacher_hidden, teacher_weight),) * 2
    found = fused_linear_kd(
        HeadInput(hidden, weight, CAP),
        [HeadInput(*one, cap) for one, cap in zip(teachers, caps, strict=True)],
        *(labels, mask, objective),
        **others,
        block_rows=5,
        fp32_logits=fp32_logits,
    )
    logits = [capped(*teachers[0], OTHER_CAP), teacher_hidden @ teacher_weight.T]
    heads = direct(capped(hidden, weight)), list(map(direct, logits))
    wanted = fused_linear_kd(*heads, labels, mask, objective, **others)
    assert_equal(found, wanted, (hidden, weight))


def test_bf16_logits_of_a_large_head_stay_within_the_cap():
    """The gradient is that of fp64 up to the rounding of logits and gradient."""
    hidden, weight, *_, labels, mask = problem(torch.bfloat16)
    objective = objective_of(kd_ratio=0.0, student_vocab_size=300, teacher_vocab_size=None)
    gradients = []
    for own, fp32 in ((hidden, False), (hidden, True), (hidden.double(), False)):
        own, head = own.clone().requires_grad_(), weight.to(own.dtype).requires_grad_()
        given = HeadInput(own, head, CAP), [], labels, mask, objective
        fused_linear_kd(*given, tp_group=None, fp32_logits=fp32).loss.backward()
        gradients.append(own.grad.double())
    for found in gradients[:2]:
        assert (found - gradients[2]).norm() <= 0.02 * gradients[2].norm()


@pytest.mark.parametrize("loss", ["partition_kl", "p_kl"])
def test_chunks_of_another_tokenizer(loss):
    case = random_case(seed=5)
    (student, teacher, chunks), shared = arguments(case, loss=loss, temperature=1.7)
    inputs = student.hidden, student.weight
    found = fused_chunk_kd(
        HeadInput(*inputs, CAP),
        HeadInput(teacher.hidden, teacher.weight, OTHER_CAP),
        chunks,
        **shared,
        chunk_rows=7,
    )
    slots = teacher.weight.nan_to_num()  # empty ones, which are never read, would spoil all columns
    heads = capped(*inputs), capped(teacher.hidden, slots, OTHER_CAP)
    wanted = fused_chunk_kd(*map(direct, heads), chunks, **shared)
    assert_equal(found, wanted, inputs, 1e-7 if loss == "p_kl" else 1e-10)  # p_kl has a matrix of fp32


def test_scores():
    hidden, weight, *_, labels, _ = problem()
    logits, rows = capped(hidden, weight), torch.arange(len(labels))
    found = token_scores(hidden, weight, rows, labels, tp_group=None, logits_cap=CAP, vocab_size=300)
    log_p = logits[:, :300].log_softmax(-1)
    assert_close(found.label, log_p[rows, labels], 1e-12)
    assert_close(found.highest, log_p.amax(-1), 1e-12)


def test_gradients_may_overwrite_the_logits_of_a_model():
    """The stored teacher's loss does so, behind the expression of `LanguageModel.logits`."""
    hidden, weight, _, _, labels, mask = problem()
    hidden.requires_grad_(), weight.requires_grad_()
    ids, log_p = torch.arange(4).repeat(len(labels), 1), torch.full((len(labels), 4), -2.0)
    objective = objective_of(kd_ratio=0.5, **BOTH)
    losses = [
        vocab_parallel_topk_kd(
            *(capped(hidden, weight), ids, log_p, labels, mask, objective),
            tp_group=None,
            teacher_metrics=None,
            overwrite_student_logits=overwrites,
        )
        for overwrites in (True, False)
    ]
    assert_equal(*losses, (hidden, weight))
