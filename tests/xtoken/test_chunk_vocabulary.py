"""Both vocabularies as columns of ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mkd.errors import UsageError
from mkd.xtoken.chunk_vocabulary import ChunkVocabulary
from mkd.xtoken.slots import TeacherSlots
from tests.xtoken.chunk_cases import relation_of

RELATION = relation_of(35, 42, 20)


def vocabularies(tp, **options):
    slots = TeacherSlots.build(RELATION, 48, 45, tp)
    return [ChunkVocabulary.build(slots, 37, rank, relation=RELATION, **options) for rank in range(tp)]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_common_pairs_and_real_columns(tp):
    for vocabulary in vocabularies(tp):
        assert vocabulary.num_common == vocabulary.common.sum() == 20
        assert vocabulary.student_real.flatten().nonzero().flatten().tolist() == list(range(37))
        assert vocabulary.teacher_real.sum() == 45
        pairs = set(zip(*(ids.tolist() for ids in RELATION.pairs()), strict=True))
        students, teachers = (ids.flatten() for ids in torch.meshgrid(torch.arange(35), torch.arange(42), indexing="ij"))
        found = vocabulary.is_common_pair(students, vocabulary.teacher_places[teachers])
        assert {(s, t) for s, t in zip(students[found].tolist(), teachers[found].tolist(), strict=True)} == pairs


def test_relaxed_pairs():
    strict, relaxed = vocabularies(2)[0], vocabularies(2, relaxed=True)[0]
    assert (len(strict.paired_student), len(relaxed.paired_student)) == (20, 22)
    students, teachers = RELATION.pairs(relaxed=True)
    assert relaxed.paired_student.tolist() == students.tolist()
    assert relaxed.paired_teacher.tolist() == relaxed.teacher_places[torch.from_numpy(teachers)].tolist()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_projection_of_all_ranks_is_the_matrix(tp):
    wanted = np.zeros((48, 45), np.float32)
    wanted[RELATION.projection.rows, RELATION.projection.columns] = RELATION.projection.values
    ranks = vocabularies(tp, with_projection=True)
    for rank, vocabulary in enumerate(ranks):
        projection = vocabulary.projection
        dense = projection.forward.to_dense()
        assert torch.equal(dense.T, projection.backward.to_dense())
        assert torch.equal(dense[vocabulary.teacher_places].T, torch.from_numpy(wanted).chunk(tp)[rank])
        kept = dense.sum(dim=0)
        real = vocabulary.student_real[rank]
        torch.testing.assert_close(projection.lost, torch.where(real, 1.0 - kept, 0.0), rtol=0.0, atol=1e-6)
    supported = torch.cat([v.projection.supported for v in ranks])
    assert torch.equal(supported[ranks[0].teacher_places], torch.from_numpy((wanted > 0).any(axis=0)))


def test_heads_without_a_common_row_are_refused():
    slots = TeacherSlots.build(relation_of(35, 42, 0), 48, 45, 1)
    with pytest.raises(UsageError, match="no common token"):
        ChunkVocabulary.build(slots, 37, 0)
