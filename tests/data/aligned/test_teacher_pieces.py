"""Borders of pieces in the teacher's tokens, and the length of its packs."""

from __future__ import annotations

import numpy as np
import pytest

from mkd.data.aligned.teacher_pieces import TeacherPieces, teacher_pieces
from mkd.data.dataset import PackedDataset
from mkd.data.packing.cutting import Pieces, cut_documents


class Side:
    """One side of a store."""

    def __init__(self, lengths):
        self.lengths = lengths.__getitem__
        self.num_tokens = int(lengths.sum())


class Store:
    """A store of one document, with its lengths on both sides and its chunks."""

    def __init__(self, *documents):
        self._chunks = [np.array(chunks, dtype=np.int64).reshape(-1, 4) for _, _, chunks in documents]
        self.document_lengths, teacher = (np.array([d[side] for d in documents]) for side in (0, 1))
        self.student, self.tokens = Side(self.document_lengths), Side(teacher)

    def chunks(self, document):
        return self._chunks[document]


def borders(store, seq_length, truncate=False):
    lengths = np.minimum(store.document_lengths, seq_length) if truncate else store.document_lengths
    starts, lengths = teacher_pieces(store, cut_documents(lengths, 0, seq_length))
    return list(zip(starts.tolist(), (starts + lengths).tolist(), strict=True))


def test_whole_documents_are_whole_for_the_teacher():
    assert borders(Store((5, 9, []), (3, 2, [[0, 1, 0, 1]])), 8) == [(0, 9), (0, 2)]


def test_identical_tokens_are_cut_where_the_student_is():
    same = Store((10, 10, [[i, i + 1, i, i + 1] for i in range(10)]))
    assert borders(same, 4) == [(0, 4), (4, 8), (8, 10)]
    assert borders(same, 4, truncate=True) == [(0, 4)]


def test_a_cut_inside_a_chunk_leaves_it_out():
    """Student tokens 3 to 5 are one chunk: pieces of 4 cut it."""
    chunks = [[0, 1, 0, 2], [1, 2, 2, 3], [2, 3, 3, 4], [3, 6, 4, 9], [6, 7, 9, 10], [7, 8, 10, 12]]
    assert borders(Store((8, 12, chunks)), 4) == [(0, 4), (9, 12)]
    assert borders(Store((8, 12, chunks)), 5) == [(0, 9 - 1), (9, 12)], (
        "the label of the last token ends the chunk"
    )
    assert borders(Store((8, 12, chunks)), 5, truncate=True) == [(0, 4)]


def test_a_cut_between_chunks_takes_the_same_proportion():
    """The first 8 student tokens, a prompt, are 16 of the teacher."""
    chunks = [[8, 9, 16, 17], [9, 10, 17, 19]]
    assert borders(Store((10, 19, chunks)), 6) == [(0, 14 - 1), (12, 19)]
    assert borders(Store((10, 19, [])), 5) == [(0, 19 * 6 // 10 - 1), (19 * 5 // 10, 19)]


def test_a_chunk_longer_than_a_piece_leaves_nothing():
    assert borders(Store((9, 4, [[0, 9, 0, 4]])), 3) == [(0, 0), (4, 4), (4, 4)]


@pytest.mark.parametrize(("multiple", "expected"), [(1, 128), (2, 128), (4, 256)])
def test_the_longest_pack(make_store, multiple, expected):
    """The packs of 8 student tokens have 3 and 61 + 60 + 5 teacher tokens."""
    documents = [[0] * 2, [0] * 8, [0] * 3, [0] * 3]
    index = PackedDataset(make_store(documents), seq_length=8, vocab_size=1, pad_id=0).index
    pieces = TeacherPieces.in_memory(
        Store(
            *((len(document), tokens, []) for document, tokens in zip(documents, (61, 3, 60, 5), strict=True))
        ),
        index,
        multiple,
    )
    assert pieces.pack_length(multiple) == expected


def test_pieces_of_any_document_lie_in_order():
    random = np.random.default_rng(0)
    for _ in range(50):
        cuts = [np.sort(random.choice(41, 20, replace=False)) for _ in range(2)]
        chunks = np.concatenate([cut.reshape(-1, 2) for cut in cuts], axis=1)
        pieces = Pieces(np.zeros(8, int), np.arange(0, 40, 5), np.full(8, 5), np.array([5] * 7 + [4]))
        starts, lengths = teacher_pieces(Store((40, 40, chunks)), pieces)
        stops = starts + lengths
        assert starts[0] == 0 and chunks[-1, 3] <= stops[-1] <= 40
        assert (np.diff(starts) >= 0).all() and (np.diff(stops) >= 0).all() and (lengths >= 0).all()
        shuffled = random.permutation(8)
        again = teacher_pieces(Store((40, 40, chunks)), pieces.select(shuffled))
        assert np.array_equal(again, [starts[shuffled], lengths[shuffled]]), "in any order of the pieces"
