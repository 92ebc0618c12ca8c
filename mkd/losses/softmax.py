"""Softmax over a vocabulary that is split across tensor-parallel ranks: the local part and the merge.

The stable local state of a shard is (max m, sum S = sum exp((z - m) / T)), as in online softmax. Source:
Milakov and Gimelshein 2018, section 3. Ranks merge by rescaling to the common maximum. A shard's own softmax
times its SHARE of the total mass is the global softmax on its columns. So the gradient pass needs one number
per row and no communication.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOWEST = -1e30  # minus infinity where a difference of two such values must stay finite


def compute_dtype(logits: Tensor) -> torch.dtype:
    """Return fp64 for fp64 logits, else fp32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def real_columns(logits: Tensor, count: int) -> Tensor:
    """Return the first `count` columns of [n, w] in the compute dtype (a view when no cast is needed).

    A shard of padding alone (count 0) gets one column of LOWEST: its share of any softmax is exactly zero.
    """
    if count == 0:
        return logits.new_full((logits.shape[0], 1), LOWEST, dtype=compute_dtype(logits))
    return logits[:, :count].to(compute_dtype(logits))


@dataclass(frozen=True)
class ShardSoftmax:
    """Softmax of `logits / temperature` over the columns of one shard alone."""

    logits: Tensor  # [n, c] compute dtype, not modified
    temperature: float
    probabilities: Tensor  # [n, c], sum to 1 on this shard
    maximum: Tensor  # [n] of the logits
    total: Tensor  # [n], sum exp((logits - maximum) / temperature)

    @classmethod
    def of(cls, logits: Tensor, temperature: float) -> ShardSoftmax:
        probabilities = local_softmax(logits, temperature)
        # The largest term of the sum is exp(0) = 1, hence the sum is 1 / the largest probability.
        total = probabilities.amax(dim=1).reciprocal()
        return cls(logits, temperature, probabilities, logits.amax(dim=1), total)

    def centred(self) -> Tensor:
        """Return (logits - maximum) / temperature, [n, c], a new tensor."""
        difference = self.logits - self.maximum[:, None]
        return difference if self.temperature == 1.0 else difference.div_(self.temperature)


def local_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Return softmax(logits / temperature) over the given columns, [n, c], a new tensor."""
    return torch.softmax(logits if temperature == 1.0 else logits / temperature, dim=1)


@dataclass(frozen=True)
class Normaliser:
    """The merge of all shards' (maximum, total) at one temperature."""

    maximum: Tensor  # [n], over the whole vocabulary
    log_sum: Tensor  # [n], ln sum exp((z - maximum) / T)
    share: Tensor  # [tp, n], probability mass of each shard
    shift: Tensor  # [tp, n], (shard's maximum - maximum) / T, <= 0

    @classmethod
    def merge(cls, maxima: Tensor, totals: Tensor, temperature: float) -> Normaliser:
        """Merge the maxima and totals [tp, n] of the shards."""
        maximum = maxima.amax(dim=0)
        shift = (maxima - maximum) / temperature
        mass = totals * shift.exp()
        total = mass.sum(dim=0)
        return cls(maximum, total.log(), mass / total, shift)

    def mean_centred(self, local_means: Tensor) -> Tensor:
        """Return the mean of (z - maximum) / T, [n], from each shard's mean of centred logits [tp, n]."""
        return (self.share * (local_means + self.shift)).sum(dim=0)

    def of_rank(self, rank: int) -> RowSoftmax:
        return RowSoftmax(self.maximum, self.log_sum, self.share[rank] if len(self.share) > 1 else None)


@dataclass(frozen=True)
class RowSoftmax:
    """The normaliser that turns a shard's logits into probabilities of the whole vocabulary; all [n]."""

    maximum: Tensor  # over the whole vocabulary
    log_sum: Tensor  # ln sum exp((z - maximum) / T)
    share: Tensor | None  # probability mass of this shard; None: 1, or not needed

    def rows(self, rows: slice) -> RowSoftmax:
        share = None if self.share is None else self.share[rows]
        return RowSoftmax(self.maximum[rows], self.log_sum[rows], share)


@dataclass(frozen=True)
class ShardRows:
    """Some columns of a shard with the normaliser of the whole vocabulary."""

    logits: Tensor  # [n, c] compute dtype, not modified
    temperature: float
    row: RowSoftmax

    def probabilities(self) -> Tensor:
        """Return the whole vocabulary's softmax on these columns, [n, c], a new tensor."""
        own = local_softmax(self.logits, self.temperature)
        return own if self.row.share is None else own.mul_(self.row.share[:, None])

    def log_probabilities(self) -> Tensor:
        """Return its logarithm, [n, c], a new tensor; finite even if the probability underflows."""
        centred = self.logits - self.row.maximum[:, None]
        if self.temperature != 1.0:
            centred.div_(self.temperature)
        return centred.sub_(self.row.log_sum[:, None])
