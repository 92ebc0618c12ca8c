"""Divergences of two distributions over the classes of a chunk, given by logarithms, class by class.

With t, s the probabilities of teacher and student and D = dL/ds (up to a constant, which no softmax notices):

    forward KL   t (ln t - ln s)                       D = -t / s
    reverse KL   s (ln s - ln t)                       D = ln s - ln t
    JSD(beta)    beta KL(t || Q) + (1 - beta) KL(s || Q)   D = (1 - beta) (ln s - ln Q),  Q = beta t + (1 - beta) s

Every gradient of the chunk losses is made of s D, D and the mean of D under s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mkd.xtoken.loss_settings import ChunkLossSettings

LARGEST_EXPONENT = 80.0  # exp of it is finite in fp32


class ClassRule(Protocol):
    """All tensors have one shape, that of the classes; `sums` [k, c] are the sums of the k parts over each chunk's classes."""

    def parts(self, log_t: Tensor, log_s: Tensor) -> list[Tensor]:
        """What to sum over classes; no summand is negative, so the value of a partition is not either."""
        ...

    def value(self, sums: Tensor) -> Tensor: ...

    def mean_slope(self, sums: Tensor) -> Tensor:
        """Mean of D under s, [c]."""
        ...

    def slope(self, log_t: Tensor, log_s: Tensor) -> Tensor:
        """D."""
        ...

    def mass_slope(self, log_t: Tensor, log_s: Tensor) -> Tensor:
        """s D, finite where s underflows."""
        ...


def rule_of(settings: ChunkLossSettings) -> ClassRule:
    """The ends of the JSD scale mean the two KLs by convention: the formula itself vanishes there."""
    if settings.divergence == "jsd" and 0.0 < settings.jsd_beta < 1.0:
        return JensenShannonRule(settings.jsd_beta)
    forward = {
        "forward_kl": 1.0,
        "reverse_kl": 0.0,
        "mixed_kl": settings.mixed_kl_weight,
        "jsd": 1.0 - settings.jsd_beta,
    }[settings.divergence]
    return KLRule(forward, 1.0 - forward)


@dataclass(frozen=True)
class KLRule:
    """forward * KL(t || s) + reverse * KL(s || t)."""

    forward: float
    reverse: float

    def parts(self, log_t: Tensor, log_s: Tensor) -> list[Tensor]:
        parts = [kl_terms(log_t, log_s)] if self.forward else []
        return parts + ([kl_terms(log_s, log_t)] if self.reverse else [])

    def value(self, sums: Tensor) -> Tensor:
        weights = [weight for weight in (self.forward, self.reverse) if weight]
        return sum(weight * part for weight, part in zip(weights, sums, strict=True))

    def mean_slope(self, sums: Tensor) -> Tensor:
        return self.reverse * sums[-1] - self.forward

    def slope(self, log_t: Tensor, log_s: Tensor) -> Tensor:
        ratio = log_t - log_s
        return ratio.clamp(max=LARGEST_EXPONENT).exp().mul_(-self.forward).sub_(ratio, alpha=self.reverse)

    def mass_slope(self, log_t: Tensor, log_s: Tensor) -> Tensor:
        result = log_t.exp().mul_(-self.forward)
        return result.addcmul_(log_s.exp(), log_s - log_t, value=self.reverse) if self.reverse else result


@dataclass(frozen=True)
class JensenShannonRule:
    """The generalised Jensen-Shannon divergence of Agarwal et al. 2024 (On-Policy Distillation, section 3), 0 < beta < 1."""

    beta: float

    def parts(self, log_t: Tensor, log_s: Tensor) -> list[Tensor]:
        log_q = self._mixture(log_t, log_s)
        return [kl_terms(log_t, log_q), kl_terms(log_s, log_q)]

    def value(self, sums: Tensor) -> Tensor:
        return self.beta * sums[0] + (1.0 - self.beta) * sums[1]

    def mean_slope(self, sums: Tensor) -> Tensor:
        return (1.0 - self.beta) * sums[1]

    def slope(self, log_t: Tensor, log_s: Tensor) -> Tensor:
        return (log_s - self._mixture(log_t, log_s)).mul_(1.0 - self.beta)

    def mass_slope(self, log_t: Tensor, log_s: Tensor) -> Tensor:
        return self.slope(log_t, log_s).mul_(log_s.exp())

    def _mixture(self, log_t: Tensor, log_s: Tensor) -> Tensor:
        return torch.logaddexp(log_t + math.log(self.beta), log_s + math.log1p(-self.beta))


def kl_terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """p ln(p / q) + (q - p); over all classes the second part adds nothing, and no term is negative.

    Close to p = q the term is p (x + expm1(-x)), x = ln(p / q): it does not cancel (see losses/divergences.py).
    """
    p, x = log_p.exp(), log_p - log_q
    near = p * (x + torch.expm1(-x))
    return torch.where(x.abs() < 1.0, near, p * x + (log_q.exp() - p)).clamp_(min=0.0)
