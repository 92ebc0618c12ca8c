"""partition_kl: the plain divergence for identical tokenizers, zero for identical models, never negative."""

from __future__ import annotations

import pytest
import torch

from mkd.config.divergence import DIVERGENCES
from mkd.losses import HeadInput
from mkd.losses.dense_reference import dense_kd
from mkd.xtoken import chunk_torch_passes
from mkd.xtoken.chains import chains
from mkd.xtoken.chunks import ONE_TO_ONE
from mkd.xtoken.fused import fused_chunk_kd
from mkd.xtoken.loss_call import LossCall
from mkd.xtoken.partition import one_to_one
from mkd.xtoken.slices import ChunkSlice
from tests.losses.objectives import MIXED, chunk_settings_of, objective_of
from tests.xtoken.chunk_cases import Case, assert_near, chunk_batch, random_case, relation_of, vocabulary_of


def call_of(case: Case, **settings) -> LossCall:
    settings = chunk_settings_of(**settings)
    return LossCall(vocabulary_of(case, {}, 0, 1)[0], settings, chunk_torch_passes, None)


def run(case: Case, **settings):
    """Return (output, gradient of the hidden states, of the head)."""
    vocabulary, teacher_weight = vocabulary_of(case, {}, 0, 1)
    hidden, weight = (t.clone().requires_grad_() for t in (case.student_hidden, case.student_weight))
    output = fused_chunk_kd(
        HeadInput(hidden, weight),
        HeadInput(case.teacher_hidden, teacher_weight),
        case.chunks,
        vocabulary=vocabulary,
        tp_group=None,
        cp_group=None,
        settings=chunk_settings_of(**settings),
    )
    output.loss.backward()
    return output, hidden.grad, weight.grad


@pytest.mark.parametrize("teacher_rows", [30, 28, 33])
def test_identical_tokenizers_have_the_plain_divergence_over_the_vocabulary(teacher_rows):
    """If one model has more rows than the other, both are conditioned on the shared ids, as in mkd.losses."""
    relation = relation_of(30, 30, 30)
    relation.common_teacher[:] = relation.common_student
    for divergence in DIVERGENCES:
        for temperature in (1.0, 2.5):
            settings = dict(MIXED, divergence=divergence, temperature=temperature)
            case = random_case((40, 0, 0, 0), (30, 36, teacher_rows), relation, seed=1)
            batch = case.chunks
            for side in (batch.student, batch.teacher):
                side.labels.remainder_(teacher_rows)  # the reference wants labels that both have
            output, of_hidden, of_weight = run(case, **settings)
            hidden, weight = (t.double().requires_grad_() for t in (case.student_hidden, case.student_weight))
            teacher_weight = case.teacher_weight.double()
            width = max(36, teacher_rows)
            logits = [
                h @ torch.nn.functional.pad(w, (0, 0, 0, width - len(w))).T
                for h, w in (
                    (hidden[batch.student.rows], weight),
                    (case.teacher_hidden.double()[batch.teacher.rows], teacher_weight),
                )
            ]
            wanted = dense_kd(
                *logits,
                batch.student.labels,
                batch.weights,
                objective_of(
                    student_vocab_size=30, teacher_vocab_size=teacher_rows, kd_ratio=1.0, **settings
                ),
            )
            wanted.loss.backward()
            torch.testing.assert_close(output.kd, wanted.kd.detach(), rtol=1e-12, atol=0.0)
            assert_near(of_hidden, hidden.grad, 1e-12)
            assert_near(of_weight, weight.grad, 1e-12)
            single = run(case.to(torch.float32), **settings)[0].kd
            torch.testing.assert_close(single.double(), wanted.kd.detach(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_teacher_equal_to_student_is_zero_with_zero_gradient(divergence, dtype):
    relation = relation_of(40, 40, 30)
    relation.common_teacher[:] = relation.common_student
    case = random_case((20, 0, 0, 0), (40, 40, 40), relation, seed=2).to(dtype)
    sides = dict(student=case.chunks.student, teacher=case.chunks.student)
    same = type(case.chunks)(**{**vars(case.chunks), **sides})
    case = type(case)(**{**vars(case), "chunks": same})
    case = type(case)(
        **{**vars(case), "teacher_hidden": case.student_hidden, "teacher_weight": case.student_weight}
    )
    output, of_hidden, of_weight = run(case, divergence=divergence, **MIXED)
    assert 0 <= output.kd < 1e-6
    assert max(of_hidden.abs().max(), of_weight.abs().max()) < 1e-6


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_never_negative(divergence):
    """10,000 random chunks of every kind, of flat, peaked and nearly equal distributions.

    Values and gradients are finite.
    """
    generator = torch.Generator().manual_seed(7)
    relation = relation_of(35, 42, 20)
    for counts in ((7000, 0, 0, 0), (0, 1000, 0, 0), (0, 0, 1000, 0), (0, 0, 0, 1000)):
        batch, _, _ = chunk_batch(relation, counts, seed=3)
        case = random_case((1, 0, 0, 0), (37, 48, 45), relation)
        call = call_of(case, divergence=divergence, **MIXED)
        piece = ChunkSlice.of(batch, range(sum(counts)), call.vocabulary)
        sizes = (len(side.chunks) for side in (piece.student, piece.teacher))
        student, teacher = (
            torch.randn(n, width, generator=generator)
            * 10 ** (4 * torch.rand(n, 1, generator=generator) - 2.2)
            for n, width in zip(sizes, (48, 48), strict=True)
        )
        if piece.kind == ONE_TO_ONE:
            teacher[::3, :48] = student[::3] + 1e-3 * torch.randn(student[::3].shape, generator=generator)
            values = one_to_one(student, teacher, torch.ones(sum(counts)), call)
        else:
            values = chains(student, teacher, torch.ones(sum(counts)), piece, call)
        assert values.min() >= 0.0
        assert values.isfinite().all() and student.isfinite().all()


@pytest.mark.parametrize("counts", [(0, 50, 0, 0), (0, 0, 50, 0), (0, 0, 0, 50)])
def test_small_rests_do_not_cancel(counts):
    """With realised tokens of probability 1 - 1e-5, fp32 is as exact as elsewhere.

    It is compared with the same pass in fp64.
    """
    relation, generator = relation_of(35, 42, 20), torch.Generator().manual_seed(1)
    call = call_of(random_case((1, 0, 0, 0), (37, 48, 45), relation))
    piece = ChunkSlice.of(chunk_batch(relation, counts, seed=3)[0], range(50), call.vocabulary)
    student, teacher = (
        torch.randn(len(side.chunks), 48, generator=generator) for side in (piece.student, piece.teacher)
    )
    student[torch.arange(len(student)), piece.student.places] += 15.0
    teacher[torch.arange(len(teacher)), piece.teacher.places] += 13.0
    exact = student.double()
    wanted = chains(exact, teacher.double(), torch.ones(50, dtype=torch.float64), piece, call)
    values = chains(student, teacher, torch.ones(50), piece, call)
    torch.testing.assert_close(values.double(), wanted, rtol=1e-4, atol=0.0)
    assert (student - exact).abs().max() < 2e-6  # probabilities near 1 from logits near 16, in fp32


def test_ties_with_the_last_of_top_k_are_in_the_support():
    case = random_case((1, 0, 0, 0), relation=relation_of(35, 42, 20))
    student, teacher = torch.randn(1, 48), torch.zeros(1, 48)
    common = call_of(case).common.nonzero().squeeze(1)
    teacher[0, common[:2]], teacher[0, common[2:6]] = 2.0, 1.0
    three, six = (one_to_one(student, teacher, None, call_of(case, top_k=k)) for k in (3, 6))
    assert torch.equal(three, six)
    assert not torch.equal(three, one_to_one(student, teacher, None, call_of(case, top_k=2)))
