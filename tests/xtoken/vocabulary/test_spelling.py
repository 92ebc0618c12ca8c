"""Spellings against their definition, over all tokens of small real tokenizers."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from mkd.xtoken.vocabulary.spelling import Pieces, Spellings, distinct_tokens, spell_all
from tests.xtoken.small_tokenizers import byte_level, sentence_piece

PAIRS = {
    "byte level <- SentencePiece": lambda: (byte_level(), sentence_piece()),
    "SentencePiece <- byte level": lambda: (sentence_piece(), byte_level()),
    "byte level <- byte level": lambda: (byte_level(700), byte_level(900, reverse=True)),
}


def build(student, teacher) -> Spellings:
    by_teacher, by_student = spell_all(teacher, student.token_bytes), spell_all(student, teacher.token_bytes)
    return Spellings.from_tokenizers(student, teacher, by_teacher, by_student)


def groups_by_definition(tokenizer, other) -> dict[tuple[int, ...], set[tuple[int, int]]]:
    """Return prefix in the other vocabulary -> {(token, last)}, token by token."""
    groups: dict[tuple[int, ...], set[tuple[int, int]]] = {}
    for own, token in distinct_tokens(tokenizer).items():
        spelled = other.spell(own)
        if spelled is not None and len(spelled) > 1:
            groups.setdefault(spelled[:-1], set()).add((token, spelled[-1]))
    return groups


@pytest.mark.parametrize("pair", PAIRS)
def test_spellings_are_what_the_other_tokenizer_writes(pair):
    student, teacher = PAIRS[pair]()
    spellings = build(student, teacher)
    one_to_many, many_to_one = groups_by_definition(student, teacher), groups_by_definition(teacher, student)
    assert len(one_to_many) > 20 and len(many_to_one) > 20
    for prefix, expected in one_to_many.items():
        students, lasts = spellings.one_to_many(prefix)
        assert (
            set(zip(students.tolist(), lasts.tolist(), strict=True)) == expected
            and students.dtype == np.int64
        )
    for prefix, expected in many_to_one.items():
        lasts, teachers = spellings.many_to_one(prefix)
        assert set(zip(teachers.tolist(), lasts.tolist(), strict=True)) == expected
    assert len(spellings.students.prefixes) == len(one_to_many) and len(spellings.teachers.prefixes) == len(
        many_to_one
    )


@pytest.mark.parametrize("pair", PAIRS)
def test_candidates_spell_the_same_bytes_and_come_once(pair):
    student, teacher = PAIRS[pair]()
    spellings = build(student, teacher)
    for prefix in groups_by_definition(student, teacher):
        students, lasts = spellings.one_to_many(prefix)
        start = b"".join(teacher.token_bytes[i] for i in prefix)
        assert [student.token_bytes[s] for s in students] == [start + teacher.token_bytes[i] for i in lasts]
        assert len(set(students.tolist())) == len(set(lasts.tolist())) == len(students)


def test_an_unknown_beginning_has_no_candidates():
    spellings = build(byte_level(), sentence_piece())
    for found in (spellings.one_to_many((5, 5, 5, 5, 5)), spellings.many_to_one((5, 5, 5, 5, 5))):
        assert [len(part) for part in found] == [0, 0] and all(part.dtype == np.int64 for part in found)


def test_spellings_are_sent_as_arrays_alone():
    spellings = build(byte_level(), sentence_piece())
    prefix = spellings.students.prefixes[0]
    before = len(pickle.dumps(spellings))
    expected = spellings.one_to_many(prefix)  # makes the dictionary
    sent = pickle.dumps(spellings)
    assert len(sent) == before
    for one, other in zip(pickle.loads(sent).one_to_many(prefix), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_of_ids_with_the_same_bytes_the_tokenizer_writes_one():
    tokenizer = sentence_piece()
    same = [i for i, own in enumerate(tokenizer.token_bytes) if own == b"e"]
    assert len(same) == 2  # the byte token <0x65> and the piece "e"
    assert (distinct_tokens(tokenizer)[b"e"],) == tokenizer.spell(b"e") == (same[1],)
    assert len(distinct_tokens(tokenizer)) == len({own for own in tokenizer.token_bytes if own})


def test_pieces_keep_empty_sequences():
    pieces = Pieces.from_sequences([(1, 2), (), (3,)])
    assert [pieces[i] for i in range(len(pieces))] == [(1, 2), (), (3,)] and pieces.lengths.tolist() == [
        2,
        0,
        1,
    ]
    assert len(Pieces.from_sequences([])) == 0
