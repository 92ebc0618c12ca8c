"""The interface of a divergence: what a class says, and how vocabulary shards use it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from mkd.losses.softmax import Normaliser, ShardRows, ShardSoftmax


class Divergence(ABC):
    """A divergence of two distributions given by log-probabilities.

    The first five methods work class by class: `log_t` and `log_s` have one shape, that of the classes, and
    `sums` [k, ...] are the k parts summed over the classes of each distribution. The others work on the
    columns of a vocabulary shard.

    With the first five alone, shards take one more pass over the logits and one more SUM over ranks. A class
    may override that with cross terms that travel with the other row statistics, as `KLMixture` does.
    """

    cross_names: tuple[str, ...] = ()
    """Cross terms of a shard, [n] each, that travel with the row statistics."""

    needs_terms: bool = True
    """True if value and gradient need `terms`, a second pass over the logits."""

    @abstractmethod
    def parts(self, log_t: Tensor, log_s: Tensor) -> list[Tensor]:
        """Return the k summands of every class."""

    @abstractmethod
    def value(self, sums: Tensor) -> Tensor:
        """Return the divergence, never negative."""

    @abstractmethod
    def mean_slope(self, sums: Tensor) -> Tensor:
        """Return the mean of D under s."""

    @abstractmethod
    def slope(self, log_t: Tensor, log_s: Tensor) -> Tensor:
        """Return D, a new tensor."""

    @abstractmethod
    def plain(self, log_t: Tensor, log_s: Tensor) -> Tensor:
        """Return the divergence over the last dimension by its formula, by autograd: for references."""

    def mass_slope(self, log_t: Tensor, log_s: Tensor) -> Tensor:
        """Return s D, a new tensor, finite where s underflows."""
        return self.slope(log_t, log_s).mul_(log_s.exp())

    def cross(self, student: ShardSoftmax, teacher: ShardSoftmax) -> dict[str, Tensor]:
        """Return the cross terms of a shard by name."""
        return {}

    def merge(
        self, cross: dict[str, Tensor], student: Normaliser, teacher: Normaliser
    ) -> tuple[Tensor, Tensor | None]:
        """Return (value [n], residual) of the whole vocabulary from the shards' cross terms, [tp, n] each."""
        raise NotImplementedError("a divergence with cross terms merges them")

    def terms(self, student: ShardRows, teacher: ShardRows) -> Tensor:
        """Return [k, n] sums over the columns of a shard; they add up over shards."""
        log_s, log_t = student.log_probabilities(), teacher.log_probabilities()
        return torch.stack([part.sum(dim=1) for part in self.parts(log_t, log_s)])

    def from_terms(self, terms: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (value [n], residual [n]) from summed terms; `gradient` needs the residual of each row."""
        return self.value(terms), self.mean_slope(terms)

    def gradient(
        self,
        student: ShardRows,
        teacher: ShardRows,
        p_s: Tensor,  # [n, c] the student's probabilities, not modified
        residual: Tensor | None,  # [n]
    ) -> Tensor:
        """Return dL/da on the columns of a shard, [n, c], a new tensor."""
        slope = self.slope(teacher.log_probabilities(), student.log_probabilities())
        return slope.sub_(residual[:, None]).mul_(p_s)
