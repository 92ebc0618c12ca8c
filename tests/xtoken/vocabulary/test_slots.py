"""Invariants of vocabulary co-sharding."""

from __future__ import annotations

import numpy as np
import pytest

from mkd.xtoken.vocabulary.relation import VocabularyRelation, build_relation
from mkd.xtoken.vocabulary.slots import EMPTY, TeacherSlots
from tests.xtoken.small_tokenizers import byte_level, sentence_piece

ROWS = {  # (padded rows of the student, rows of the teacher), for tokenizers of 900 and 700 ids
    "as wide as the tokenizers": (904, 700),
    "models wider than tokenizers": (1024, 1500),
    "teacher much larger": (904, 9001),
    "teacher much smaller": (8192, 700),
    "models narrower than tokenizers": (640, 512),
}


@pytest.fixture(scope="module", params=["student larger", "teacher larger"])
def relation(request) -> VocabularyRelation:
    small, large = sentence_piece(700), byte_level(900)
    return build_relation(large, small) if request.param == "student larger" else build_relation(small, large)


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", ROWS)
def test_common_tokens_meet_and_every_row_has_one_place(relation, rows, tp_size):
    student_rows, teacher_rows = ROWS[rows]
    slots = TeacherSlots.from_relation(relation, student_rows, teacher_rows, tp_size)
    student_width, width = student_rows // tp_size, slots.teacher_ids.shape[1]
    assert slots.teacher_ids.shape[0] == tp_size and slots.common.shape == (tp_size, student_width)
    assert width == max(student_width, -(-teacher_rows // tp_size))  # nothing smaller holds both

    flat = slots.teacher_ids.reshape(-1)
    assert sorted(flat[flat != EMPTY].tolist()) == list(range(teacher_rows))
    np.testing.assert_array_equal(flat[slots.columns], np.arange(teacher_rows))

    twins = dict(zip(relation.common_student.tolist(), relation.common_teacher.tolist(), strict=True))
    for rank in range(tp_size):
        for column in range(student_width):
            twin = twins.get(rank * student_width + column, EMPTY)
            exists = twin != EMPTY and twin < teacher_rows
            assert slots.common[rank, column] == exists
            assert not exists or slots.teacher_ids[rank, column] == twin
    assert slots.common.sum() > 100


def test_padding_of_the_student_has_no_twin(relation):
    students, teachers = relation.pairs()
    last = int(students[-1])  # the tokenizer has a token more than the model
    slots = TeacherSlots.from_relation(relation, 1024, 1024, 2, student_vocab_size=last)
    assert slots.common.sum() == len(students) - 1 and not slots.common.reshape(-1)[last]
    assert slots.teacher_ids.reshape(-1)[slots.columns[teachers[-1]]] == teachers[-1]


def test_rows_without_a_twin_are_spread_over_the_ranks(relation):
    slots = TeacherSlots.from_relation(relation, 904, 9001, 4)
    assert np.ptp((slots.teacher_ids != EMPTY).sum(1)) <= 3


def test_identical_tokenizers_keep_their_order():
    slots = TeacherSlots.from_relation(build_relation(byte_level(), byte_level()), 904, 900, 2)
    expected = np.arange(904).reshape(2, 452)
    expected[expected >= 900] = EMPTY
    np.testing.assert_array_equal(slots.teacher_ids, expected)
    np.testing.assert_array_equal(slots.common, expected != EMPTY)
