"""p_kl: not negative, and zero where the projection of the student is the teacher."""

from __future__ import annotations

import pytest
import torch

from mkd.config.divergence import DIVERGENCES
from mkd.xtoken import chunk_torch_passes
from mkd.xtoken.loss_call import LossCall
from mkd.xtoken.projected import projected
from mkd.xtoken.slices import ChunkSlice
from mkd.xtoken.vocabulary.sparse import SparseMatrix
from tests.losses.objectives import chunk_settings_of
from tests.xtoken.chunk_cases import chunk_batch, random_case, relation_of, vocabulary_of


def problem(relation, sizes, counts, divergence="forward_kl"):
    """Return (slice, call)."""
    settings = chunk_settings_of(loss="p_kl", divergence=divergence)
    case = random_case((1, 0, 0, 0), sizes, relation)
    call = LossCall(vocabulary_of(case, dict(loss="p_kl"), 0, 1)[0], settings, chunk_torch_passes, None)
    return ChunkSlice.of(chunk_batch(relation, counts, seed=3)[0], range(sum(counts)), call.vocabulary), call


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("whole", [False, True])
def test_never_negative(divergence, whole):
    """Peaked distributions of several rows; with rows of the matrix that are empty, and with none."""
    relation, generator = relation_of(37, 45, 20, whole_projection=whole), torch.Generator().manual_seed(0)
    for counts in ((500, 0, 0, 0), (0, 300, 0, 0), (0, 0, 300, 0), (0, 0, 0, 300)):
        piece, call = problem(relation, (37, 48, 45), counts, divergence)
        rows = (len(side.chunks) for side in (piece.student, piece.teacher))
        student, teacher = (5.0 * torch.randn(n, 48, generator=generator) for n in rows)
        values = projected(student, teacher, torch.ones(sum(counts)), piece, call)
        assert values.min() >= 0.0
        assert values.isfinite().all() and student.isfinite().all()


def test_a_permutation_of_the_student_is_at_no_distance():
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    relation = relation_of(40, 40, 10)
    relation = relation.with_projection(
        SparseMatrix.from_entries(range(40), order.numpy(), [1.0] * 40, (40, 40))
    )
    piece, call = problem(relation, (40, 40, 40), (6, 0, 0, 0))
    student, teacher = torch.randn(6, 40), torch.empty(6, 40)
    teacher[:, call.vocabulary.teacher_places[order]] = student
    values = projected(student, teacher, torch.ones(6), piece, call)
    assert values.max() < 1e-6 and student.abs().max() < 1e-6
