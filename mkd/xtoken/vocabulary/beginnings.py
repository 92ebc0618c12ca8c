"""Which common token each token of two vocabularies begins with: the classes of prefix_kl."""

from __future__ import annotations

import numpy as np

from mkd.xtoken.vocabulary.spelling import Pieces

NONE = -1


def beginnings(
    common_student: np.ndarray,  # [k] int64
    common_teacher: np.ndarray,  # [k] int64, their twins
    by_teacher: Pieces,  # the student's tokens as the teacher writes them
    by_student: Pieces,  # the teacher's tokens as the student writes them
) -> tuple[np.ndarray, np.ndarray]:
    """([student_size], [teacher_size]) int64: the common token, as a student id, that each id begins with; -1 without one.

    A common token begins with itself, another with what the first token of its spelling in the other vocabulary begins with.
    """
    students, teachers = np.full(len(by_teacher), NONE), np.full(len(by_student), NONE)
    students[common_student], teachers[common_teacher] = common_student, common_student
    unknown = len(students) + len(teachers) + 1
    while (left := np.count_nonzero(students == NONE) + np.count_nonzero(teachers == NONE)) < unknown:
        unknown = left
        _look_up(students, by_teacher, teachers)
        _look_up(teachers, by_student, students)
    return students, teachers


def _look_up(classes: np.ndarray, spelled: Pieces, of_other: np.ndarray) -> None:
    """Give the ids without a class that of their first piece, where it has one."""
    ids = np.flatnonzero((classes == NONE) & (spelled.lengths > 0))
    classes[ids] = of_other[spelled.ids[spelled.offsets[ids]]]
