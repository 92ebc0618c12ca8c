"""Supports of chunks: the same bytes on both sides, the realised pair first, no id twice."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from mkd.data.aligned.chunk_selection import Supports
from mkd.data.batch import collate
from mkd.xtoken.chunks import MANY_TO_MANY, MANY_TO_ONE, ONE_TO_MANY, ONE_TO_ONE
from tests.data.pairs import COARSE, STUDENT, TEACHER, open_pair, relation, teacher_text, texts


class Table:
    """Spellings of a made-up vocabulary, with the same pairs after any prefix."""

    def __init__(self, pairs):
        self._pairs = tuple(np.array(ids, dtype=np.int64) for ids in zip(*pairs, strict=True))

    def one_to_many(self, prefix):
        assert prefix == (7,)
        return self._pairs

    many_to_one = one_to_many


def supports_of(kind, student, teacher, spellings):
    """Return [(student id, teacher id), ...] of one chunk with these tokens.

    The rows 3 and 1 predict them.
    """
    labels = np.array([0, 0, 0, *student]), np.array([0, *teacher])
    counts = np.array([[len(student), len(teacher)]])
    sizes, *ids = Supports(spellings).look_up(
        np.array([kind], dtype=np.int8), np.array([[3, 1]]), counts, labels
    )
    assert sizes.tolist() == [len(ids[0])] and all(own.dtype == np.int64 for own in (sizes, *ids))
    return list(zip(*(own.tolist() for own in ids), strict=True))


def test_pairs_that_contradict_the_text_go():
    table = Table([(10, 20), (11, 21), (12, 22)])
    assert supports_of(ONE_TO_MANY, [11], [7, 21], table) == [(11, 21), (10, 20), (12, 22)]
    assert supports_of(ONE_TO_MANY, [11], [7, 20], table) == [(11, 20), (12, 22)]
    assert supports_of(MANY_TO_ONE, [7, 9], [22], table) == [(9, 22), (10, 20), (11, 21)]


def test_kinds_without_further_pairs():
    table = Table([(10, 20)])
    assert supports_of(ONE_TO_ONE, [10], [20], table) == []
    assert supports_of(MANY_TO_MANY, [7, 8], [7, 9], table) == [(8, 9)]
    assert supports_of(ONE_TO_MANY, [8], [7, 9], None) == [(8, 9)]


def test_pickled_supports_give_the_same():
    table = pickle.loads(pickle.dumps(Supports(Table([(10, 20)]))))
    sizes, *_ = table.look_up(
        np.array([ONE_TO_MANY]), np.array([[0, 0]]), np.array([[1, 2]]), (np.array([1]), np.array([7, 2]))
    )
    assert sizes.tolist() == [2]


@pytest.mark.parametrize("teacher", [TEACHER, COARSE], ids=["fine", "coarse"])
def test_supports_of_real_vocabularies_spell_the_same_bytes(write_jsonl, tmp_path, teacher):
    path = write_jsonl("texts.jsonl", *({"text": text} for text in texts()))
    dataset, _ = open_pair(path, tmp_path, teacher_text(teacher, spellings=relation(teacher).spellings))
    chunks = collate([dataset[i] for i in range(len(dataset))]).teacher_inputs[0].chunks
    seen = set()
    for i in np.flatnonzero(chunks.kinds != ONE_TO_ONE).tolist():
        pairs = slice(*chunks.support_offsets[i : i + 2])
        assert set(chunks.support_chunks[pairs].tolist()) == {i}
        ids = [own[pairs].tolist() for own in (chunks.support_student, chunks.support_teacher)]
        tokens = [
            side.labels[slice(*side.host_offsets[i : i + 2])].tolist()
            for side in (chunks.student, chunks.teacher)
        ]
        assert [own[0] for own in ids] == [own[-1] for own in tokens], "the realised pair is the first one"
        assert all(len(set(own)) == len(own) for own in ids)
        before = [
            _spelled(tokenizer, own[:-1]) for tokenizer, own in zip((STUDENT, teacher), tokens, strict=True)
        ]
        for pair in zip(*ids, strict=True):
            spelled = [
                b + _spelled(t, [last]) for b, t, last in zip(before, (STUDENT, teacher), pair, strict=True)
            ]
            assert spelled[0] == spelled[1]
        seen.add((int(chunks.kinds[i]), len(ids[0]) > 1))
    assert {(ONE_TO_MANY, True), (MANY_TO_MANY, False)} <= seen and (
        teacher is TEACHER or (MANY_TO_ONE, True) in seen
    )


def _spelled(tokenizer, ids):
    return b"".join(tokenizer.token_bytes[i] for i in ids)
