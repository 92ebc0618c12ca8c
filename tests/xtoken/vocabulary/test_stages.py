"""Each stage of the projection matrix alone, on vocabularies of a few tokens."""

from __future__ import annotations

import numpy as np
import pytest

from mkd.xtoken.vocabulary.spelling import Pieces
from mkd.xtoken.vocabulary.stages import exact_map, multi_token_map, role_pairs, special_map


def test_exact_map_pairs_identical_bytes():
    matrix = exact_map([b"a", None, b" the", b"a", b"x", b""], {b" the": 1, b"a": 4}, 5)
    assert [matrix.row(i) for i in range(6)] == [{4: 1.0}, {}, {1: 1.0}, {4: 1.0}, {}, {}]
    assert matrix.shape == (6, 5)


def test_multi_token_map_weighs_the_first_piece_most():
    by_teacher = Pieces.from_sequences([(3, 1), (), (2, 2, 1), (0, 1, 2, 3, 4)])
    # The student writes teacher token 4 as 1, 0.
    by_student = Pieces.from_sequences([(), (), (), (), (1, 0)])
    matrix = multi_token_map(by_teacher, by_student)
    weights = np.array([0.9, 0.09, 0.009, 0.0009])
    assert matrix.row(0) == pytest.approx({3: 0.9 / 0.99, 1: 0.09 / 0.99, 4: 0.09 / 0.99})
    assert matrix.row(1) == pytest.approx({4: 0.9 / 0.99})  # by the reverse pass alone
    assert matrix.row(2) == pytest.approx({2: (0.9 + 0.09) / 0.999, 1: 0.009 / 0.999})
    # The fifth piece is left out.
    assert matrix.row(3) == pytest.approx(dict(enumerate(weights / weights.sum())))


def test_special_tokens_pair_by_role():
    student, teacher = (
        {"bos": 7, "eos": 8, "end_of_turn": 9, "pad": 8},
        {"eos": 1, "end_of_turn": 1, "pad": 2, "unk": 0},
    )
    matrix = special_map(student, teacher, (10, 3))
    assert {i: matrix.row(i) for i in range(10) if matrix.row(i)} == {8: {1: 1.0}, 9: {1: 1.0}}
    both = special_map({"eos": 4, "end_of_turn": 4, "pad": 4}, {"eos": 1, "end_of_turn": 2, "pad": 0}, (5, 3))
    assert both.row(4) == {1: 0.5, 2: 0.5}
    assert role_pairs(student, teacher) == {8: 1}  # one-to-one: 1 and 8 are taken by their first role
    assert role_pairs({"eos": 1, "end_of_turn": 2}, {"eos": 5, "end_of_turn": 6}) == {1: 5, 2: 6}
    assert role_pairs({"bos": 1}, {"eos": 1}) == {}
