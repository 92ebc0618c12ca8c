"""The support of a chunk with several tokens on one side: which last tokens could stand at the end of it."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mkd.xtoken.chunks import MANY_TO_ONE, ONE_TO_MANY, ONE_TO_ONE
from mkd.xtoken.vocabulary.spelling import Spellings

CACHED_SUPPORTS = 1 << 16  # chunks: texts repeat themselves


class Supports:
    """Looks supports up. Can be pickled for workers."""

    def __init__(self, spellings: Spellings | None):
        """Without spellings the support of a chunk is its realised pair alone."""
        self._spellings = spellings
        self._cached = lru_cache(CACHED_SUPPORTS)(self._pairs)

    def __reduce__(self):
        return Supports, (self._spellings,)

    def of(
        self,
        kinds: np.ndarray,  # [c] int8
        rows: np.ndarray,  # [c, 2] int64, student and teacher: the row that predicts the first token of a chunk
        counts: np.ndarray,  # [c, 2] int64, its tokens
        labels: tuple[np.ndarray, np.ndarray],  # of the student's and the teacher's pack, int64
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(pairs of each chunk [c], student ids [p], teacher ids [p]), all int64; a 1-1 chunk has none."""
        sizes = np.zeros(len(kinds), dtype=np.int64)
        pairs = [np.zeros((2, 0), dtype=np.int64)]
        for i in np.flatnonzero(kinds != ONE_TO_ONE).tolist():
            tokens = (
                tuple(own[row : row + count].tolist())
                for own, row, count in zip(labels, rows[i].tolist(), counts[i].tolist(), strict=True)
            )
            pairs.append(self._cached(int(kinds[i]), *tokens))
            sizes[i] = pairs[-1].shape[1]
        return sizes, *np.concatenate(pairs, axis=1)

    def _pairs(self, kind: int, student: tuple[int, ...], teacher: tuple[int, ...]) -> np.ndarray:
        """[2, p] int64: student ids and teacher ids of the last tokens, the realised pair first.

        Where a token of the realised pair is in another pair too, the text decides and that pair goes.
        """
        realised = np.array([[student[-1]], [teacher[-1]]], dtype=np.int64)
        if self._spellings is None or kind not in (ONE_TO_MANY, MANY_TO_ONE):
            return realised
        if kind == ONE_TO_MANY:
            pairs = np.stack(self._spellings.one_to_many(teacher[:-1]))
        else:
            pairs = np.stack(self._spellings.many_to_one(student[:-1]))
        return np.concatenate([realised, pairs[:, (pairs != realised).all(axis=0)]], axis=1)
