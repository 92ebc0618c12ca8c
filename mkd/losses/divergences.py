"""Divergences D(teacher, student): what each needs from a vocabulary shard, its value and its gradient.

Notation: a = z_s / T and b = z_t / T over the ids that both models have, p_s and p_t their softmax over the WHOLE
vocabulary, q_s and q_t their softmax over the columns of one shard, d = (b - max b) - (a - max a).

A divergence either gets by with cross terms that travel with the other row statistics (`KLMixture`), or needs one more
pass over the logits once both softmaxes are known, and one more SUM over ranks (`JensenShannon`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mkd.losses.softmax import Normaliser, ShardRows, ShardSoftmax


class Divergence(Protocol):
    """The plug of a new divergence; `mkd/losses/triton_rows.py` holds the same formulas for GPUs.

    cross_names: cross terms of a shard, [n] each, that travel with the statistics.
    needs_terms: whether `terms` must run before value and gradient are known.
    residual: the [n] number of each row that the gradient needs beside both softmaxes (None if it needs none).
    """

    cross_names: tuple[str, ...]
    needs_terms: bool

    def cross(self, student: ShardSoftmax, teacher: ShardSoftmax) -> dict[str, Tensor]: ...

    def merge(
        self, cross: dict[str, Tensor], student: Normaliser, teacher: Normaliser
    ) -> tuple[Tensor, Tensor | None]:
        """(value [n], residual) of the whole vocabulary from every shard's cross terms, [tp, n] each."""
        ...

    def terms(self, student: ShardRows, teacher: ShardRows) -> Tensor:
        """[2, n] sums over the columns of a shard; they add up over shards."""
        ...

    def from_terms(self, terms: Tensor) -> tuple[Tensor, Tensor | None]:
        """(value [n], residual) from the summed terms."""
        ...

    def gradient(
        self, student: ShardRows, teacher: ShardRows, p_s: Tensor, residual: Tensor | None
    ) -> Tensor:
        """dD/da on the columns of a shard, [n, c], a new tensor; leaves p_s [n, c]."""
        ...


@dataclass(frozen=True)
class KLMixture:
    """forward * KL(p_t || p_s) + reverse * KL(p_s || p_t)."""

    forward: float
    reverse: float

    needs_terms = False

    @property
    def cross_names(self) -> tuple[str, ...]:
        return ("forward_cross",) * (self.forward != 0) + ("reverse_cross",) * (self.reverse != 0)

    def cross(self, student: ShardSoftmax, teacher: ShardSoftmax) -> dict[str, Tensor]:
        """C_t / S_t and C_s / S_s of the shard: the means of d under q_t and of -d under q_s.

        Centring both sides first keeps the digits that `b - a` would lose where the models' logits differ by an offset.
        """
        difference = teacher.centred().sub_(student.centred())
        crosses = {}
        if self.reverse:
            crosses["reverse_cross"] = -(difference * student.probabilities).sum(dim=1)
        if self.forward:
            crosses["forward_cross"] = difference.mul_(teacher.probabilities).sum(dim=1)
        return {name: crosses[name] for name in self.cross_names}

    def merge(
        self, cross: dict[str, Tensor], student: Normaliser, teacher: Normaliser
    ) -> tuple[Tensor, Tensor | None]:
        """KL(p_t || p_s) = C_t / S_t - ln S_t + ln S_s, and the other way round.

        A shard's mean of d moves by the shift of both maxima and counts with its mass under the averaging model.
        """
        shift = teacher.shift - student.shift
        value, residual = 0.0, None
        if self.forward:
            mean = (teacher.share * (cross["forward_cross"] + shift)).sum(dim=0)
            value = self.forward * (mean - teacher.log_sum + student.log_sum)
        if self.reverse:
            mean = (student.share * (cross["reverse_cross"] - shift)).sum(dim=0)
            residual = mean - student.log_sum + teacher.log_sum
            value = value + self.reverse * residual
        return value.clamp(min=0.0), residual  # rounding alone makes it negative

    def gradient(
        self, student: ShardRows, teacher: ShardRows, p_s: Tensor, residual: Tensor | None
    ) -> Tensor:
        """forward (p_s - p_t) + reverse p_s (ln p_s - ln p_t - KL(p_s || p_t))."""
        result = None
        if self.forward:
            result = teacher.probabilities()
            torch.sub(p_s, result, out=result)
            if self.forward != 1.0:
                result.mul_(self.forward)
        if self.reverse:
            reverse = student.log_probabilities().sub_(teacher.log_probabilities()).sub_(residual[:, None])
            reverse.mul_(p_s).mul_(self.reverse)
            result = reverse if result is None else result.add_(reverse)
        return result


@dataclass(frozen=True)
class JensenShannon:
    """beta KL(p_t || Q) + (1 - beta) KL(p_s || Q) with Q = beta p_t + (1 - beta) p_s, 0 < beta < 1.

    The generalised Jensen-Shannon divergence of Agarwal et al. 2024 (On-Policy Distillation of Language Models, section 3).
    """

    beta: float

    needs_terms = True
    cross_names = ()

    def cross(self, student: ShardSoftmax, teacher: ShardSoftmax) -> dict[str, Tensor]:
        return {}

    def terms(self, student: ShardRows, teacher: ShardRows) -> Tensor:
        """This shard's part of KL(p_t || Q) and of KL(p_s || Q)."""
        log_p_s, log_p_t = student.log_probabilities(), teacher.log_probabilities()
        log_q = self._log_mixture(log_p_s, log_p_t)
        return torch.stack([_kl_terms(log_p_t, log_q), _kl_terms(log_p_s, log_q)])

    def from_terms(self, terms: Tensor) -> tuple[Tensor, Tensor]:
        terms = terms.clamp(min=0.0)  # rounding alone makes them negative
        return self.beta * terms[0] + (1.0 - self.beta) * terms[1], terms[1]

    def gradient(
        self, student: ShardRows, teacher: ShardRows, p_s: Tensor, residual: Tensor | None
    ) -> Tensor:
        """(1 - beta) p_s (ln p_s - ln Q - KL(p_s || Q))."""
        log_p_s = student.log_probabilities()
        log_q = self._log_mixture(log_p_s, teacher.log_probabilities())
        return log_p_s.sub_(log_q).sub_(residual[:, None]).mul_(p_s).mul_(1.0 - self.beta)

    def _log_mixture(self, log_p_s: Tensor, log_p_t: Tensor) -> Tensor:
        return torch.logaddexp(log_p_t + math.log(self.beta), log_p_s + math.log1p(-self.beta))


def _kl_terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Sum over columns of p ln(p / q) + (q - p), [n]; over the whole vocabulary the second part adds nothing.

    With it no summand is negative, and an error that all logarithms of p share (that of its normaliser) no longer counts at
    first order, which matters where both are alike. Close to p = q the summand is p (x + expm1(-x)), x = ln(p / q).
    """
    p, x = log_p.exp(), log_p - log_q
    near = p * (x + torch.expm1(-x))
    return torch.where(x.abs() < 1.0, near, p * x + (log_q.exp() - p)).sum(dim=1)


def _jsd(beta: float) -> Divergence:
    """The ends of the scale mean the two KLs by convention: the formula itself vanishes there."""
    if beta in (0.0, 1.0):
        return KLMixture(forward=1.0 - beta, reverse=beta)
    return JensenShannon(beta)


DIVERGENCES: dict[str, Callable[[float, float], Divergence]] = {
    "forward_kl": lambda jsd_beta, mixed_kl_weight: KLMixture(1.0, 0.0),
    "reverse_kl": lambda jsd_beta, mixed_kl_weight: KLMixture(0.0, 1.0),
    "mixed_kl": lambda jsd_beta, mixed_kl_weight: KLMixture(mixed_kl_weight, 1.0 - mixed_kl_weight),
    "jsd": lambda jsd_beta, mixed_kl_weight: _jsd(jsd_beta),
}
"""Name -> the divergence, from (jsd_beta, mixed_kl_weight)."""
