"""Pieces to packs of a fixed number of tokens: best-fit decreasing.

It needs at most 11/9 of the optimal number of packs, plus a constant. Source: Johnson, Demers, Ullman, Garey,
Graham, "Worst-case performance bounds for simple one-dimensional packing algorithms", SIAM J. Comput. 3(4),
1974.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mkd.config.run_files import PACKINGS


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


def pack_pieces(
    lengths: np.ndarray, seq_length: int, pack: str, together: int = 1, tags: np.ndarray | None = None
) -> Packs:
    """Put pieces of `lengths` tokens (padded), int64 [pieces], into packs of at most `seq_length` tokens.

    Deterministic. Packs are ordered by their first piece, and pieces inside a pack by number, so that
    unshuffled packs follow the corpus. `together` consecutive pieces always share a pack, and pieces with
    different `tags` [pieces] never do.
    """
    assert pack in PACKINGS
    if together > 1:
        tags = None if tags is None else tags[::together]
        packs = pack_pieces(lengths.reshape(-1, together).sum(axis=1), seq_length, pack, tags=tags)
        pieces = packs.piece_ids[:, None] * together + np.arange(together)
        return Packs(packs.offsets * together, pieces.reshape(-1))
    if pack == "none" or len(lengths) == 0:
        return Packs(np.arange(len(lengths) + 1), np.arange(len(lengths)))
    pack_of_piece, num_packs = np.empty(len(lengths), dtype=np.int64), 0
    for tag in (None,) if tags is None else np.unique(tags):
        which = slice(None) if tag is None else np.flatnonzero(tags == tag)
        pack_of_piece[which] = num_packs + _best_fit_decreasing(lengths[which], seq_length)
        num_packs = pack_of_piece[which].max() + 1
    first_piece = np.empty(pack_of_piece.max() + 1, dtype=np.int64)
    first_piece[pack_of_piece[::-1]] = np.arange(len(lengths))[::-1]  # the last one written stays
    rank = np.empty_like(first_piece)
    rank[np.argsort(first_piece)] = np.arange(len(rank))
    pack_of_piece = rank[pack_of_piece]
    sizes = np.bincount(pack_of_piece)
    return Packs(np.concatenate([[0], np.cumsum(sizes)]), np.argsort(pack_of_piece, kind="stable"))


def _best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the pack of each piece, int64 [pieces]: longest first, each into the fullest pack with room.

    Packs are grouped by their room, and pieces by their length. Bit r of `rooms` is set if some pack has room
    r, so the smallest sufficient room is the lowest set bit after a shift. A pack that takes one piece and
    could take another one of this length then is the fullest: so it takes as many as it can hold.
    """
    order = np.argsort(capacity - lengths, kind="stable")
    counts = np.bincount(lengths, minlength=1)
    assert len(counts) <= capacity + 1, "a piece fits into an empty pack"
    packs_with_room: list[list[int]] = [[] for _ in range(capacity)]
    rooms, num_packs = 0, 0
    packs: list[int] = []  # in the order of `order`, with the number of pieces that each takes there
    taken: list[int] = []
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            sufficient = rooms >> length
            room = length + (sufficient & -sufficient).bit_length() - 1 if sufficient else capacity
            each = room // length
            wanted = -(-left // each)
            if sufficient:
                stack = packs_with_room[room]
                chosen = stack[: -wanted - 1 : -1]
                del stack[-wanted:]
                rooms ^= 0 if stack else 1 << room
            else:
                chosen = list(range(num_packs, num_packs + wanted))
                num_packs += wanted
            last = min(left - each * (len(chosen) - 1), each)  # pieces of the last of these packs
            for some, pieces in ((chosen[:-1], each), (chosen[-1:], last)):
                packs += some
                taken += [pieces] * len(some)
                if some and room - pieces * length:
                    packs_with_room[room - pieces * length] += some
                    rooms |= 1 << room - pieces * length
            left -= each * (len(chosen) - 1) + last
    pack_of_piece = np.empty(len(lengths), dtype=np.int64)
    pack_of_piece[order] = np.repeat(packs, taken)
    return pack_of_piece
