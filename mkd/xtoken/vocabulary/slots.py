"""Vocabulary co-sharding: each common teacher token on the rank and in the column of its student twin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mkd.xtoken.vocabulary.relation import VocabularyRelation

EMPTY = -1


@dataclass(frozen=True)
class TeacherSlots:
    """The place of each row of the teacher's LM head, if each of tp ranks holds w_t columns.

    Rank r of the student's head holds the ids [r * w_s, (r + 1) * w_s), as Megatron shards it. With the
    teacher's rows in slot order, both probabilities of a common token are in column j of the same rank. So a
    1-1 chunk needs elementwise work and scalar reductions only, and no vocabulary is gathered.
    """

    teacher_ids: np.ndarray  # [tp, w_t] int64, teacher's row in each column, or EMPTY (-1); w_t >= w_s
    columns: np.ndarray  # [teacher_rows] int64, rank * w_t + column of each row of the teacher
    common: np.ndarray  # [tp, w_s] bool, True if column j holds a common pair

    @staticmethod
    def from_relation(
        relation: VocabularyRelation,
        student_rows: int,  # rows of the padded head
        teacher_rows: int,  # real rows
        tp_size: int,
        student_vocab_size: int | None = None,  # the student's real rows; default: all rows
    ) -> TeacherSlots:
        """Place the teacher's rows next to the student's.

        Rows beyond the tokenizers belong to no common pair. A pair with an id that has no real row in its
        model is not common. w_t is the smallest possible: max(student_rows / tp_size, teacher_rows / tp_size
        rounded up).
        """
        assert student_rows % tp_size == 0, "the student's vocabulary is padded to a multiple of the ranks"
        student_width = student_rows // tp_size
        width = max(student_width, -(-teacher_rows // tp_size))
        students, teachers = relation.pairs()
        real_rows = student_rows if student_vocab_size is None else student_vocab_size
        placed = (students < real_rows) & (teachers < teacher_rows)
        students, teachers = students[placed], teachers[placed]

        teacher_ids = np.full((tp_size, width), EMPTY, np.int64)
        teacher_ids[students // student_width, students % student_width] = teachers
        common = teacher_ids[:, :student_width] != EMPTY
        others = np.setdiff1d(np.arange(teacher_rows), teachers)
        columns, ranks = np.nonzero(teacher_ids.T == EMPTY)  # column by column, so that all ranks get a share
        teacher_ids[ranks[: len(others)], columns[: len(others)]] = others

        places = np.full(teacher_rows, EMPTY, np.int64)
        used = teacher_ids.reshape(-1) != EMPTY
        places[teacher_ids.reshape(-1)[used]] = np.flatnonzero(used)
        return TeacherSlots(teacher_ids, places, common)
