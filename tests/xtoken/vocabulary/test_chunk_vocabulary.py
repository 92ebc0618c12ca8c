"""Both vocabularies as columns of ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mkd.errors import UsageError
from mkd.xtoken.vocabulary.chunk_vocabulary import ChunkVocabulary, ClassMap
from mkd.xtoken.vocabulary.slots import TeacherSlots
from tests.reported import refused
from tests.xtoken.chunk_cases import relation_of

RELATION = relation_of(35, 42, 20)


def vocabularies(tp, **options):
    slots = TeacherSlots.from_relation(RELATION, 48, 45, tp)
    return [ChunkVocabulary.from_slots(slots, 37, rank, relation=RELATION, **options) for rank in range(tp)]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_common_pairs_and_real_columns(tp):
    for vocabulary in vocabularies(tp):
        assert vocabulary.num_common == vocabulary.common.sum() == 20
        assert vocabulary.student_real.flatten().nonzero().flatten().tolist() == list(range(37))
        assert vocabulary.teacher_real.sum() == 45
        pairs = set(zip(*(ids.tolist() for ids in RELATION.pairs()), strict=True))
        students, teachers = np.meshgrid(np.arange(35), np.arange(42), indexing="ij")
        places = vocabulary.teacher_places.numpy()[teachers]
        ranks, columns = students // vocabulary.student_width, students % vocabulary.student_width
        is_twin = places == ranks * vocabulary.teacher_width + columns
        found = vocabulary.common.numpy()[ranks, columns] & is_twin
        assert set(zip(students[found].tolist(), teachers[found].tolist(), strict=True)) == pairs


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
    ranks = vocabularies(tp, loss="p_kl")
    for rank, vocabulary in enumerate(ranks):
        assert vocabulary.projection.teacher is None
        dense = checked(vocabulary.projection.student, vocabulary.student_real[rank])
        assert torch.equal(dense[vocabulary.teacher_places].T, torch.from_numpy(wanted).chunk(tp)[rank])
    supported = torch.cat([v.projection.supported for v in ranks])
    assert torch.equal(supported[ranks[0].teacher_places], torch.from_numpy((wanted > 0).any(axis=0)))


def checked(classes: ClassMap, real: torch.Tensor) -> torch.Tensor:
    dense = classes.forward.to_dense()
    assert torch.equal(dense.T, classes.backward.to_dense())
    torch.testing.assert_close(
        classes.lost, torch.where(real, 1.0 - dense.sum(dim=0), 0.0), rtol=0.0, atol=1e-6
    )
    return dense


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_beginnings_of_all_ranks_are_those_of_the_relation(tp):
    ranks = vocabularies(tp, loss="prefix_kl")
    maps = [v.projection for v in ranks]
    student = torch.cat(
        [checked(one.student, v.student_real[v.rank]) for one, v in zip(maps, ranks, strict=True)], dim=1
    )
    teacher = torch.cat(
        [checked(one.teacher, v.teacher_real[v.rank]) for one, v in zip(maps, ranks, strict=True)], dim=1
    )
    for dense, places, wanted in (
        (student, torch.arange(37), RELATION.student_beginnings),
        (teacher, ranks[0].teacher_places, RELATION.teacher_beginnings),
    ):
        found = torch.where(dense.sum(dim=0) > 0, dense.argmax(dim=0), -1)
        places = places[: len(wanted)]
        assert found[places].tolist() == wanted[: len(places)].tolist()
        assert (dense.sum(dim=0) <= 1).all()
    assert torch.equal(torch.cat([one.supported for one in maps]), ranks[0].common.flatten())


def test_heads_without_a_common_row_are_refused():
    slots = TeacherSlots.from_relation(relation_of(35, 42, 0), 48, 45, 1)
    with refused("tokenizers-differ: student and teacher have no common", UsageError):
        ChunkVocabulary.from_slots(slots, 37, 0)
