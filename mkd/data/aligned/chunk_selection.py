"""The chunks of a pack that have loss, their kinds, and the candidates that they compare."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mkd.data.aligned.teacher_batch import PackChunks
from mkd.xtoken.chunks import MANY_TO_MANY, MANY_TO_ONE, ONE_TO_MANY, ONE_TO_ONE
from mkd.xtoken.vocabulary.spelling import Spellings

CACHED_SUPPORTS = 1 << 16  # chunks; the same chunks recur often


class ChunkSelection:
    """Chooses the chunks of a pack that have loss, for one teacher. Picklable, for workers."""

    def __init__(
        self,
        spellings: Spellings | None,  # None: chunks other than 1-1 have only the realised pair
        twins: np.ndarray | None,  # [student ids] teacher id of the twin, -1: none; None: unknown
        vocab_size: int,  # token ids that the teacher's model knows
    ):
        self._supports, self._twins = Supports(spellings), twins
        if twins is not None:
            self._is_twin = np.zeros(max(vocab_size, int(twins.max(initial=-1)) + 1), dtype=bool)
            self._is_twin[twins[twins >= 0]] = True

    def __call__(
        self,
        chunks: np.ndarray,  # [c, 4] int64, positions in the packs; none starts at 0
        labels: np.ndarray,  # [s] int64, of the student's pack
        loss_mask: np.ndarray,  # [s] float32
        teacher_labels: np.ndarray,  # [s'] int64, of the teacher's pack
    ) -> PackChunks:
        """Return the chunks whose student tokens all have loss.

        A 1-1 chunk becomes an M-N chunk if one of its two tokens has another twin. Its pairs would compare
        the wrong tokens, so only the realised text is compared. An example is the end of a turn, if one model
        ends turns and documents with the same token.
        """
        rows, counts = chunks[:, ::2] - 1, chunks[:, 1::2] - chunks[:, ::2]  # [c, 2], student and teacher
        losses = np.concatenate([[0], np.cumsum(loss_mask > 0)])
        wanted = losses[rows[:, 0] + counts[:, 0]] - losses[rows[:, 0]] == counts[:, 0]
        kinds = chunk_kinds(counts[:, 0], counts[:, 1])
        if self._twins is not None:
            twins, realised = self._twins[labels[rows[:, 0]]], teacher_labels[rows[:, 1]]
            is_single = kinds == ONE_TO_ONE
            kinds[is_single & (twins != realised) & ((twins >= 0) | self._is_twin[realised])] = MANY_TO_MANY
        rows, counts, kinds = rows[wanted], counts[wanted], kinds[wanted]
        supports = self._supports.look_up(kinds, rows, counts, (labels, teacher_labels))
        return PackChunks(rows[:, 0], counts[:, 0], rows[:, 1], counts[:, 1], kinds, *supports)


def chunk_kinds(student_counts: np.ndarray, teacher_counts: np.ndarray) -> np.ndarray:
    """Return the kind of chunks with these numbers of tokens, int8 [c]."""
    kinds = np.array([[ONE_TO_ONE, ONE_TO_MANY], [MANY_TO_ONE, MANY_TO_MANY]], dtype=np.int8)
    return kinds[(student_counts > 1).astype(int), (teacher_counts > 1).astype(int)]


class Supports:
    """The support of a chunk: the pairs of last tokens that are its candidates. Picklable, for workers."""

    def __init__(self, spellings: Spellings | None):
        """Keep `spellings`; without them the support of a chunk is its realised pair alone."""
        self._spellings = spellings
        self._cached = lru_cache(CACHED_SUPPORTS)(self._pairs)

    def __reduce__(self) -> tuple[type[Supports], tuple[Spellings | None]]:
        return Supports, (self._spellings,)

    def look_up(
        self,
        kinds: np.ndarray,  # [c] int8
        rows: np.ndarray,  # [c, 2] int64, student and teacher: the row that predicts a chunk's first token
        counts: np.ndarray,  # [c, 2] int64, its tokens
        labels: tuple[np.ndarray, np.ndarray],  # of the student's and the teacher's pack, int64
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (number of pairs of each chunk [c], student ids [p], teacher ids [p]), int64.

        A 1-1 chunk has no pairs.
        """
        sizes = np.zeros(len(kinds), dtype=np.int64)
        pairs = [np.zeros((2, 0), dtype=np.int64)]
        for i in np.flatnonzero(kinds != ONE_TO_ONE).tolist():
            tokens = (
                tuple(side[row : row + count].tolist())
                for side, row, count in zip(labels, rows[i].tolist(), counts[i].tolist(), strict=True)
            )
            pairs.append(self._cached(int(kinds[i]), *tokens))
            sizes[i] = pairs[-1].shape[1]
        return sizes, *np.concatenate(pairs, axis=1)

    def _pairs(self, kind: int, student: tuple[int, ...], teacher: tuple[int, ...]) -> np.ndarray:
        """Return [2, p] int64: student ids and teacher ids of the last tokens, the realised pair first.

        Every other pair that contains a token of the realised pair is dropped.
        """
        realised = np.array([[student[-1]], [teacher[-1]]], dtype=np.int64)
        if self._spellings is None or kind not in (ONE_TO_MANY, MANY_TO_ONE):
            return realised
        if kind == ONE_TO_MANY:
            pairs = np.stack(self._spellings.one_to_many(teacher[:-1]))
        else:
            pairs = np.stack(self._spellings.many_to_one(student[:-1]))
        return np.concatenate([realised, pairs[:, (pairs != realised).all(axis=0)]], axis=1)
