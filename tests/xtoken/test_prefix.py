"""prefix_kl: not negative, zero where both models agree, the plain divergence for one vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mkd.config.divergence import DIVERGENCES
from mkd.xtoken import chunk_torch_passes
from mkd.xtoken.loss_call import LossCall
from mkd.xtoken.projected import prefix_kl
from mkd.xtoken.slices import ChunkSlice
from tests.losses.objectives import chunk_settings_of
from tests.xtoken.chunk_cases import chunk_batch, random_case, relation_of, vocabulary_of


def problem(relation, sizes, counts, divergence="forward_kl"):
    """Return (slice, call)."""
    settings = chunk_settings_of(loss="prefix_kl", divergence=divergence)
    case = random_case((1, 0, 0, 0), sizes, relation)
    call = LossCall(vocabulary_of(case, dict(loss="prefix_kl"), 0, 1)[0], settings, chunk_torch_passes, None)
    return ChunkSlice.of(chunk_batch(relation, counts, seed=3)[0], range(sum(counts)), call.vocabulary), call


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_never_negative(divergence):
    """Peaked distributions, 10,000 chunks of every kind."""
    relation, generator = relation_of(37, 45, 20), torch.Generator().manual_seed(0)
    for counts in np.diag([4000, 2000, 2000, 2000]):
        piece, call = problem(relation, (37, 48, 45), tuple(counts.tolist()), divergence)
        rows = (len(side.chunks) for side in (piece.student, piece.teacher))
        student, teacher = (5.0 * torch.randn(n, 48, generator=generator) for n in rows)
        values = prefix_kl(student, teacher, torch.ones(int(counts.sum())), piece, call)
        assert values.min() >= 0.0
        assert values.isfinite().all() and student.isfinite().all()


def test_one_vocabulary_gives_the_plain_divergence():
    relation = relation_of(40, 40, 40)
    piece, call = problem(relation, (40, 40, 40), (6, 0, 0, 0))
    student, other = torch.randn(2, 6, 40, dtype=torch.float64)
    teacher = torch.empty_like(other)
    teacher[:, call.vocabulary.teacher_places[torch.from_numpy(relation.twins())]] = other
    p, q = other.softmax(dim=1), student.softmax(dim=1)
    values = prefix_kl(student, teacher, torch.ones(6), piece, call)
    torch.testing.assert_close(values, (p * (p / q).log()).sum(dim=1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(student, q - p, rtol=1e-10, atol=1e-12)


def test_a_teacher_of_longer_tokens_is_met_by_their_beginnings():
    """All of the teacher's probability is on tokens that the student cannot say.

    The student is to say the tokens that they begin with.
    """
    relation = relation_of(37, 45, 20)
    piece, call = problem(relation, (37, 48, 45), (1, 0, 0, 0))
    longer = np.flatnonzero(
        (relation.teacher_beginnings >= 0) & ~np.isin(np.arange(45), relation.common_teacher)
    )
    masses = torch.rand(len(longer), generator=torch.Generator().manual_seed(1)) + 0.1
    teacher, student = torch.full((1, 48), -60.0), torch.full((1, 48), -60.0)
    teacher[0, call.vocabulary.teacher_places[torch.from_numpy(longer)]] = masses.log()
    wanted = torch.zeros(48).index_add_(0, torch.from_numpy(relation.teacher_beginnings[longer]), masses)
    student[0] = torch.where(wanted > 0, wanted.log(), student[0])
    assert prefix_kl(student, teacher, torch.ones(1), piece, call).item() < 1e-6
    assert student.abs().max() < 1e-6
