"""Documents to pieces, pieces to packs of a fixed number of tokens, packs to one row of documents.

Packing is best-fit decreasing. It needs at most 11/9 of the optimal number of packs, plus a constant. Source:
Johnson, Demers, Ullman, Garey, Graham, "Worst-case performance bounds for simple one-dimensional packing
algorithms", SIAM J. Comput. 3(4), 1974.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

OVERLONG = ("split", "truncate", "drop")
PACKINGS = ("bfd", "none")


@dataclass(frozen=True)
class Pieces:
    """Parts of documents that fit into a pack, in corpus order. All arrays are int64 [pieces].

    Position i of a piece has a label for i < num_labels: the next token of the document. A document of n
    tokens that is split keeps its n-1 labels: the last token of a piece still predicts the first one of the
    next.
    """

    document: np.ndarray
    offset: np.ndarray  # first token in the document
    length: np.ndarray  # tokens
    num_labels: np.ndarray  # length, or length - 1 where the document ends or is cut off

    def __len__(self) -> int:
        return len(self.document)

    def select(self, which: np.ndarray) -> Pieces:
        return Pieces(self.document[which], self.offset[which], self.length[which], self.num_labels[which])


@dataclass(frozen=True)
class Packs:
    """The pieces of each pack (compressed sparse rows): pack p has piece_ids[offsets[p] : offsets[p + 1]]."""

    offsets: np.ndarray  # int64 [packs + 1]
    piece_ids: np.ndarray  # int64 [pieces]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def pieces_of(self, pack: int) -> np.ndarray:
        """Return the pieces of a pack, int64 [n]."""
        return self.piece_ids[self.offsets[pack] : self.offsets[pack + 1]]


def padded_lengths(lengths: np.ndarray, multiple: int) -> np.ndarray:
    """Return the tokens that documents occupy in a pack. No other code decides it.

    Context parallelism needs multiples.
    """
    return -(-lengths // multiple) * multiple


def cut_documents(lengths: np.ndarray, first_document: int, seq_length: int, overlong: str) -> Pieces:
    """Cut the documents first_document, first_document + 1, ... into pieces of at most `seq_length` tokens.

    `lengths` int64 [documents]. Documents longer than `seq_length` are `split` into pieces, `truncate`d to
    the first one, or `drop`ped. Pieces without any label (a single token at the end of a document) are
    skipped.
    """
    assert overlong in OVERLONG
    documents = np.arange(first_document, first_document + len(lengths))
    if overlong == "drop":
        documents, lengths = documents[lengths <= seq_length], lengths[lengths <= seq_length]
    elif overlong == "truncate":
        lengths = np.minimum(lengths, seq_length)
    per_document = -(-lengths // seq_length)
    total = int(per_document.sum())
    rank = np.arange(total) - np.repeat(np.cumsum(per_document) - per_document, per_document)
    offset = rank * seq_length
    left = np.repeat(lengths, per_document) - offset
    length = np.minimum(left, seq_length)
    num_labels = np.minimum(length, left - 1)
    pieces = Pieces(np.repeat(documents, per_document), offset, length, num_labels)
    return pieces.select(num_labels > 0)


def pack_pieces(lengths: np.ndarray, seq_length: int, pack: str) -> Packs:
    """Put pieces of `lengths` tokens (padded), int64 [pieces], into packs of at most `seq_length` tokens.

    Deterministic. Packs are ordered by their first piece, and pieces inside a pack by number, so that
    unshuffled packs follow the corpus.
    """
    assert pack in PACKINGS
    if pack == "none" or len(lengths) == 0:
        return Packs(np.arange(len(lengths) + 1), np.arange(len(lengths)))
    pack_of_piece = _best_fit_decreasing(lengths, seq_length)
    _, first_piece = np.unique(pack_of_piece, return_index=True)
    rank = np.empty(len(first_piece), dtype=np.int64)
    rank[np.argsort(first_piece)] = np.arange(len(first_piece))
    pack_of_piece = rank[pack_of_piece]
    sizes = np.bincount(pack_of_piece)
    return Packs(np.concatenate([[0], np.cumsum(sizes)]), np.argsort(pack_of_piece, kind="stable"))


def as_row(values: np.ndarray) -> Tensor:
    """Return `values` [t] as a tensor [1, t]."""
    return torch.from_numpy(values)[None]


def cumulative(lengths: np.ndarray) -> Tensor:
    """Return the borders of documents as packed attention takes them, int32 [documents + 1].

    `lengths` [documents] are their tokens.
    """
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def position_ids(spans: np.ndarray) -> Tensor:
    """Return positions that start at 0 in every document of `spans` [documents] tokens, int64 [1, t]."""
    return as_row(np.arange(spans.sum()) - np.repeat(np.cumsum(spans) - spans, spans))


def _best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the pack of each piece, int64 [pieces]: longest first, each into the fullest pack with room.

    Packs are grouped by their room; bit r of `rooms` is set if some pack has room r. So the smallest
    sufficient room is the lowest set bit after a shift, and 1M pieces take a few seconds.
    """
    order = np.argsort(-lengths, kind="stable")
    packs_with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms, num_packs, chosen = 0, 0, []
    for length in lengths[order].tolist():
        sufficient = rooms >> length
        if sufficient:
            room = length + (sufficient & -sufficient).bit_length() - 1
            pack = packs_with_room[room].pop()
            if not packs_with_room[room]:
                rooms ^= 1 << room
        else:
            room, pack = capacity, num_packs
            num_packs += 1
        room -= length
        assert room >= 0, "a piece fits into an empty pack"
        if room:
            packs_with_room[room].append(pack)
            rooms |= 1 << room
        chosen.append(pack)
    pack_of_piece = np.empty(len(lengths), dtype=np.int64)
    pack_of_piece[order] = chosen
    return pack_of_piece
