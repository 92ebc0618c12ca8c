"""Alignment by dynamic programming over token texts, as published cross-tokenizer systems do it.

Source: X-Token (arXiv 2605.21699). Tokens are written in one canonical form. Trigrams that occur once in both
sequences are anchors. Between anchors the best path is searched. It scores +3 for equal tokens, -3 for
unequal ones, -1.5 for a skipped token, and +1.5 k for k tokens that spell one. Then runs of mismatches are
merged, and cut again where both sides spell the same.

Two things differ from the published form. The canonical form of a token is the bytes that it spells: all ways
in which vocabularies write blanks and bytes amount to that. And the work is bounded: a stretch between
anchors with more than MAX_CELLS cells is not searched but treated as one run of mismatches.

`best_path` is plain loops over arrays, which numba compiles if installed (pip install numba).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np

from mkd.tokenizers.spans import EncodedText, token_groups

ANCHOR_LENGTH = 3
MAX_CELLS = 2**24  # 16 MiB of moves, a fraction of a second compiled
MAX_COMBINATION = 4
# Scores: equal tokens (unequal: -MATCH), a skipped token, each joined token.
MATCH, GAP, COMBINED = 3.0, -1.5, 1.5


class _Block(NamedTuple):
    """Neighbouring units of both sides, [start, end) each; one side may be empty."""

    student_start: int
    student_end: int
    teacher_start: int
    teacher_end: int


@dataclass(frozen=True)
class _Units:
    """One side as the search sees it: tokens that share a span are one unit."""

    texts: tuple[bytes, ...]
    first: np.ndarray  # [units + 1] int64, first token of each unit, and the end of the last one

    @classmethod
    def from_encoded(cls, encoded: EncodedText, data: bytes) -> _Units:
        first, starts, ends = token_groups(encoded)
        spans = zip(starts.tolist(), ends.tolist(), strict=True)
        return cls(tuple(data[start:end] for start, end in spans), first)

    @cached_property
    def trigrams(self) -> list[tuple[bytes, ...]]:
        return list(zip(*(self.texts[k:] for k in range(ANCHOR_LENGTH)), strict=False))

    def joined(self, start: int, end: int) -> bytes:
        return b"".join(self.texts[start:end])


def align_dp(
    student: EncodedText,
    teacher: EncodedText,
    data: bytes,  # the text
    *,
    compile: bool = True,
    max_cells: int = MAX_CELLS,
) -> np.ndarray:
    """Return chunks [c, 4] int64 as `align_spans`, without stretches that spell different texts."""
    ours, theirs = _Units.from_encoded(student, data), _Units.from_encoded(teacher, data)
    search = _Search(ours, theirs, compiled() if compile else best_path, max_cells)
    blocks = [block for stretch in _between_anchors(ours, theirs) for block in search(stretch)]
    cut = [piece for block in _merged(blocks, ours, theirs) for piece in _cut(block, ours, theirs)]
    found = np.array(cut, dtype=np.int64).reshape(-1, 4)
    return np.concatenate([ours.first[found[:, :2]], theirs.first[found[:, 2:]]], axis=1)


def _between_anchors(ours: _Units, theirs: _Units) -> Iterator[_Block]:
    """Yield the stretches between anchors that cross no other, and each anchor's middle token, in order."""
    counts = [Counter(side.trigrams) for side in (ours, theirs)]
    places = {gram: j for j, gram in enumerate(theirs.trigrams) if counts[0][gram] == counts[1][gram] == 1}
    pairs = [(i, places[gram]) for i, gram in enumerate(ours.trigrams) if gram in places]
    pairs = np.array(pairs).reshape(-1, 2)
    others = pairs[:, 1]
    straight = np.maximum.accumulate(others) == others
    straight &= np.minimum.accumulate(others[::-1])[::-1] == others
    i0 = j0 = 0
    for i, j in (pairs[straight] + ANCHOR_LENGTH // 2).tolist():
        yield _Block(i0, i, j0, j)
        yield _Block(i, i + 1, j, j + 1)
        i0, j0 = i + 1, j + 1
    yield _Block(i0, len(ours.texts), j0, len(theirs.texts))


class _Search:
    """The search for the best path through a stretch, as blocks."""

    def __init__(self, ours: _Units, theirs: _Units, kernel, max_cells: int):
        numbers = {text: i for i, text in enumerate(dict.fromkeys(ours.texts + theirs.texts))}
        self._sides = [_numbered(side, numbers) for side in (ours, theirs)]
        self._kernel, self._max_cells = kernel, max_cells

    def __call__(self, stretch: _Block) -> list[_Block]:
        i0, i1, j0, j1 = stretch
        if i0 == i1 and j0 == j1:
            return []
        if i0 == i1 or j0 == j1 or (i1 - i0) * (j1 - j0) > self._max_cells:
            return [stretch]
        ours, theirs = self._sides
        steps = self._kernel(ours[:, i0:i1], theirs[:, j0:j1])
        return [_Block(*step) for step in (steps + [i0, i0, j0, j0]).tolist()]


def _numbered(side: _Units, numbers: dict[bytes, int]) -> np.ndarray:
    """Return numbers of the texts of up to MAX_COMBINATION joined units, int64 [MAX_COMBINATION, units].

    Row k - 1 has the number of the k joined units that end at each unit; -1 for a text without a number.
    """
    size = len(side.texts)
    rows = np.full((MAX_COMBINATION, size), -1, dtype=np.int64)
    for k in range(1, MAX_COMBINATION + 1):
        rows[k - 1, k - 1 :] = [numbers.get(side.joined(end - k, end), -1) for end in range(k, size + 1)]
    return rows


def _merged(blocks: list[_Block], ours: _Units, theirs: _Units) -> Iterator[_Block]:
    """Yield the blocks, with each run of neighbours whose texts differ merged into one."""
    for equal, run in groupby(blocks, lambda block: operator.eq(*_texts(block, ours, theirs))):
        if equal:
            yield from run
        else:
            run = list(run)
            yield _Block(run[0].student_start, run[-1].student_end, run[0].teacher_start, run[-1].teacher_end)


def _cut(block: _Block, ours: _Units, theirs: _Units) -> list[tuple[int, int, int, int]]:
    """Cut the block wherever tokens end on both sides; return nothing if the sides spell different texts."""
    left, right = _texts(block, ours, theirs)
    if left != right:
        return []
    i0, i1, j0, j1 = block
    ends = [np.cumsum([0, *map(len, texts)]) for texts in (ours.texts[i0:i1], theirs.texts[j0:j1])]
    _, rows, columns = np.intersect1d(*ends, assume_unique=True, return_indices=True)
    rows, columns = (rows + i0).tolist(), (columns + j0).tolist()
    return list(zip(rows, rows[1:], columns, columns[1:], strict=False))


def _texts(block: _Block, ours: _Units, theirs: _Units) -> tuple[bytes, bytes]:
    i0, i1, j0, j1 = block
    return ours.joined(i0, i1), theirs.joined(j0, j1)


def best_path(
    # [MAX_COMBINATION, n] int64: row k - 1 numbers the text of the k tokens that end here, or -1
    ours: np.ndarray,
    theirs: np.ndarray,  # [MAX_COMBINATION, m] int64
) -> np.ndarray:
    """Return the blocks of the best path, without gaps, int64 [steps, 4].

    A block is (student start, end, teacher start, end). The scores are those of X-Token (arXiv 2605.21699).
    Ties go to a pair of single tokens, then to the combination of fewest tokens, then to skipping a student
    token.
    """
    n, m = ours.shape[1], theirs.shape[1]
    depth = MAX_COMBINATION + 1  # the rows that a move can reach back to, and the current one
    scores = np.zeros((depth, m + 1))
    took = np.zeros((n + 1, m + 1), dtype=np.int8)  # 10 * student tokens + teacher tokens of the last block
    took[0, 1:] = 1
    scores[0] = GAP * np.arange(m + 1)
    for i in range(1, n + 1):
        row, above = scores[i % depth], scores[(i - 1) % depth]
        row[0], took[i, 0] = GAP * i, 10
        for j in range(1, m + 1):
            best, move = above[j - 1] + (MATCH if ours[0, i - 1] == theirs[0, j - 1] else -MATCH), 11
            for k in range(2, min(MAX_COMBINATION, j) + 1):
                value = above[j - k] + COMBINED * k
                if theirs[k - 1, j - 1] == ours[0, i - 1] and value > best:
                    best, move = value, 10 + k
            for k in range(2, min(MAX_COMBINATION, i) + 1):
                value = scores[(i - k) % depth, j - 1] + COMBINED * k
                if ours[k - 1, i - 1] == theirs[0, j - 1] and value > best:
                    best, move = value, 10 * k + 1
            if above[j] + GAP > best:
                best, move = above[j] + GAP, 10
            if row[j - 1] + GAP > best:
                best, move = row[j - 1] + GAP, 1
            row[j], took[i, j] = best, move
    blocks = np.empty((n + m, 4), dtype=np.int64)
    count, i, j = 0, n, m
    while i > 0 or j > 0:
        up, left = int(took[i, j]) // 10, int(took[i, j]) % 10
        blocks[count] = i - up, i, j - left, j
        count, i, j = count + 1, i - up, j - left
    return blocks[:count][::-1]


@cache
def compiled() -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return `best_path`, compiled if numba is installed."""
    try:
        from numba import njit
    except ImportError:
        return best_path
    return njit(cache=True)(best_path)
