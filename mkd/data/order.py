"""The pack of sample k of a training run: a function of k and the seed alone.

So one number is the position in the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np

STORED_PACKS = 1 << 22  # a larger data set's permutation is computed, not stored: 32 MB
ROUNDS = 6


class SampleOrder(Protocol):
    def __call__(self, first: int, count: int) -> np.ndarray:
        """Return the pack numbers of the samples first, first + 1, ..., int64 [count]."""


class EpochOrder:
    """Sample k is pack `permutation(seed, k // size)[k % size]`; without `shuffle` it is pack k % size."""

    def __init__(self, size: int, seed: int, shuffle: bool):
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self._epoch = -1  # the last one used, with its permutation: samples are read in order
        self._permutation: np.ndarray | ComputedPermutation = np.arange(0)

    def __call__(self, first: int, count: int) -> np.ndarray:
        epochs, places = np.divmod(np.arange(first, first + count), self._size)
        if not self._shuffle:
            return places
        chosen = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            chosen[inside] = self._permutation_of(int(epoch))[places[inside]]
        return chosen

    def _permutation_of(self, epoch: int) -> np.ndarray | ComputedPermutation:
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
            is_stored = self._size <= STORED_PACKS
            permutation = generator.permutation if is_stored else partial(ComputedPermutation, generator)
            self._epoch, self._permutation = epoch, permutation(self._size)
        return self._permutation


class ComputedPermutation:
    """A pseudo-random permutation of the numbers below `size` that takes no memory, read like an array.

    A Feistel network permutes all numbers of an even number of bits. From a number that is not below `size`
    it moves to the next one, which permutes the rest ("cycle walking"). Source: Black, Rogaway, "Ciphers
    with arbitrary finite domains", CT-RSA 2002, sections 4 and 5.
    """

    def __init__(self, generator: np.random.Generator, size: int):
        self._size, self._half = size, np.uint64(-(-(size - 1).bit_length() // 2))
        self._keys = generator.integers(0, 1 << 63, ROUNDS, dtype=np.uint64)

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers at `places` of the permutation, int64 [n]."""
        found = self._permute(places.astype(np.uint64))
        while len(beyond := np.flatnonzero(found >= self._size)):
            found[beyond] = self._permute(found[beyond])
        return found.astype(np.int64)

    def _permute(self, numbers: np.ndarray) -> np.ndarray:
        mask = (np.uint64(1) << self._half) - np.uint64(1)
        left, right = numbers >> self._half, numbers & mask
        for key in self._keys:
            left, right = right, left ^ (mixed(right + key) & mask)
        return left << self._half | right


def mixed(numbers: np.ndarray) -> np.ndarray:
    """Return numbers whose bits depend on all bits of `numbers`, uint64: the finaliser of SplitMix64.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 17.
    """
    numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return numbers ^ numbers >> np.uint64(31)


class BlendOrder:
    """Samples of several data sets, interleaved by weight; each data set has separate epochs.

    Pack numbers count the packs of all data sets, one data set after the other.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool):
        self._weights = np.asarray(weights, dtype=np.float64) / np.sum(weights)
        self._orders = [EpochOrder(size, seed, shuffle) for size in sizes]
        self._offsets = np.cumsum(sizes) - sizes

    def __call__(self, first: int, count: int) -> np.ndarray:
        members, ordinals = interleave(self._weights, first, count)
        chosen = np.empty(count, dtype=np.int64)
        for member in np.unique(members):
            inside = np.flatnonzero(members == member)  # these have consecutive ordinals
            packs = self._orders[member](int(ordinals[inside[0]]), len(inside))
            chosen[inside] = self._offsets[member] + packs
        return chosen


def evenly_spaced(sizes: Sequence[int], weights: Sequence[float] | None, count: int) -> np.ndarray:
    """Return `count` packs that represent all data sets, int64, ascending.

    They are evenly spaced over all packs or, with `weights`, over each data set. A data set with fewer packs
    than its share repeats some. Packs are numbered as in BlendOrder.
    """
    if weights is None:
        return np.arange(count) * sum(sizes) // max(count, 1)
    members, ordinals = interleave(np.asarray(weights, dtype=np.float64) / np.sum(weights), 0, count)
    shares = np.bincount(members, minlength=len(sizes))
    return np.sort(
        (np.cumsum(sizes) - sizes)[members] + ordinals * np.asarray(sizes)[members] // shares[members]
    )


def interleave(weights: np.ndarray, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (member, ordinal in the member) of the samples first, first + 1, ..., both int64 [count].

    The weights sum to 1. The next sample always comes from the member that is furthest behind its weight.
    Sample c of a member with weight w is due at (c + 1/2) / w, and samples come in the order in which they
    are due. This is the method of apportionment of Webster, or Sainte-Lague. About t +- members/2 samples are
    due up to t. So the order around sample k follows from the due times around k, without counting from the
    first sample.
    """
    slack = len(weights) + 2
    begin = np.floor(weights * max(first - slack, 0) + 0.5).astype(np.int64)
    end = np.floor(weights * (first + count + slack) + 0.5).astype(np.int64)
    members = np.repeat(np.arange(len(weights)), end - begin)
    starts = np.cumsum(end - begin) - (end - begin)
    ordinals = np.arange(len(members)) + (begin - starts)[members]
    due = (ordinals + 0.5) / weights[members]
    chosen = np.lexsort((members, due))[first - begin.sum() :][:count]
    return members[chosen], ordinals[chosen]
