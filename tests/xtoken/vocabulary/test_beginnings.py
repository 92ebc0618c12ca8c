"""Beginnings: the common token that a token's text starts with. With tokenizers: test_relation.py."""

from __future__ import annotations

import numpy as np

from mkd.xtoken.vocabulary.spelling import Pieces, build_beginnings


def test_a_chain_of_spellings():
    """Student: a, ab, abcd, a control token; teacher: a, abc, a control token.

    The teacher writes "ab" as a + ..., and "abcd" as abc + ..., the student "abc" as ab + ...
    """
    by_teacher = Pieces.from_sequences([(0,), (0, 0), (1, 0), ()])
    by_student = Pieces.from_sequences([(0,), (1, 0), ()])
    students, teachers = build_beginnings(np.array([0]), np.array([0]), by_teacher, by_student)
    assert students.tolist() == [0, 0, 0, -1]
    assert teachers.tolist() == [0, 0, -1]


def test_without_a_common_token_there_is_none():
    nothing = np.zeros(0, np.int64)
    students, teachers = build_beginnings(
        nothing, nothing, Pieces.from_sequences([(1,), (0,)]), Pieces.from_sequences([(1,), (0,)])
    )
    assert students.tolist() == teachers.tolist() == [-1, -1]
