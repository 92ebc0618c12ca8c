"""gold and h_kl are not negative, and zero for equal models; the published form is negative."""

from __future__ import annotations

import pytest
import torch

from mkd.config.divergence import DIVERGENCES
from mkd.xtoken import chunk_torch_passes
from mkd.xtoken.loss_call import LossCall
from mkd.xtoken.published.dense_losses import hybrid
from mkd.xtoken.slices import ChunkSlice
from tests.losses.objectives import chunk_settings_of
from tests.xtoken.chunk_cases import chunk_batch, random_case, relation_of, vocabulary_of


def problem(counts, loss, divergence="forward_kl", scale=3.0):
    """Return (student logits, teacher logits, slice, call)."""
    relation = relation_of(35, 42, 20)
    case, generator = random_case((1, 0, 0, 0), (37, 48, 45), relation), torch.Generator().manual_seed(1)
    settings = chunk_settings_of(loss=loss, divergence=divergence)
    call = LossCall(vocabulary_of(case, dict(loss=loss), 0, 1)[0], settings, chunk_torch_passes, None)
    piece = ChunkSlice.of(chunk_batch(relation, counts, seed=3)[0], range(sum(counts)), call.vocabulary)
    rows = (len(side.chunks) for side in (piece.student, piece.teacher))
    return *(scale * torch.randn(n, 48, generator=generator) for n in rows), piece, call


@pytest.mark.parametrize("loss", ["gold", "h_kl"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_never_negative(loss, divergence):
    for counts in ((500, 0, 0, 0), (0, 300, 0, 0), (0, 0, 300, 0), (0, 0, 0, 300)):
        student, teacher, piece, call = problem(counts, loss, divergence)
        values = hybrid(student, teacher, torch.ones(sum(counts)), piece, call)
        assert values.min() >= 0.0
        assert values.isfinite().all() and student.isfinite().all()


def test_the_published_form_is_negative_on_the_same_chunks():
    student, teacher, _, call = problem((500, 0, 0, 0), "gold")
    vocabulary = call.vocabulary
    log_s, log_t = (
        torch.log_softmax(z.masked_fill(~real[0], float("-inf")), dim=1)[:, paired]
        for z, real, paired in (
            (student, vocabulary.student_real, vocabulary.paired_student),
            (teacher, vocabulary.teacher_real, vocabulary.paired_teacher),
        )
    )
    assert (log_t.exp() * (log_t - log_s)).sum(dim=1).min() < 0.0


def test_equal_models_are_at_no_distance():
    relation = relation_of(48, 48, 30)
    relation.common_teacher[:] = relation.common_student
    case = random_case((1, 0, 0, 0), (48, 48, 48), relation)
    settings = chunk_settings_of(loss="gold")
    call = LossCall(vocabulary_of(case, {}, 0, 1)[0], settings, chunk_torch_passes, None)
    piece = ChunkSlice.of(chunk_batch(relation, (9, 0, 0, 0), seed=3)[0], range(9), call.vocabulary)
    student = torch.randn(9, 48)
    teacher = student.clone()
    values = hybrid(student, teacher, torch.ones(9), piece, call)
    assert values.max() < 1e-6 and student.abs().max() < 1e-6
