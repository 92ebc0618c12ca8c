"""The inner loop of `align_dp`: plain loops over arrays, so that numba can compile the same code."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

MAX_COMBINATION = 4
# Scores: equal tokens (unequal: -MATCH), a skipped token, each joined token.
MATCH, GAP, COMBINED = 3.0, -1.5, 1.5


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
