"""Divergences D(teacher, student): a class each, for vocabulary shards and for the classes of aligned chunks.

Notation: t and s are the probabilities of teacher and student. D = dL/ds up to a constant, which no softmax
notices. Both losses differentiate by a = z_s / T, where s is a softmax: dL/da = s (D - mean of D under s).

    forward KL          D = -t / s
    reverse KL          D = ln s - ln t
    JSD(beta)           D = (1 - beta) (ln s - ln Q),       Q = beta t + (1 - beta) s
    skewed forward KL   D = (1 - alpha) (1 - t / m),        m = alpha t + (1 - alpha) s
    skewed reverse KL   D = ln s - ln m + alpha (1 - s / m),  m = (1 - alpha) t + alpha s

To add a divergence: declare it in `mkd/config/divergence.py`, write its class here, and name it in
`IMPLEMENTATIONS` (docs/extending.md). Formulas for GPUs are in `mkd/losses/triton/triton_divergences.py`; a
class without a formula runs in torch passes on GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mkd.config.divergence import DECLARATIONS, DivergenceSettings
from mkd.errors import UsageError
from mkd.losses.divergence_base import Divergence
from mkd.losses.softmax import Normaliser, ShardRows, ShardSoftmax

LARGEST_EXPONENT = 80.0  # exp of it is finite in fp32


@dataclass(frozen=True)
class KLMixture(Divergence):
    """forward * KL(t || s) + reverse * KL(s || t).

    On shards q_s and q_t are the softmax over the columns of one shard, and d = (b - max b) - (a - max a)
    with b = z_t / T.
    """

    forward: float
    reverse: float

    needs_terms = False

    @property
    def cross_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("forward_cross",) * (self.forward != 0) + ("reverse_cross",) * (self.reverse != 0)

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

    def plain(self, log_t: Tensor, log_s: Tensor) -> Tensor:
        return self.forward * plain_kl(log_t, log_s) + self.reverse * plain_kl(log_s, log_t)

    def cross(self, student: ShardSoftmax, teacher: ShardSoftmax) -> dict[str, Tensor]:
        """Return C_t / S_t and C_s / S_s of the shard: the means of d under q_t and of -d under q_s.

        Centring both sides first keeps the digits that `b - a` would lose where the models' logits differ by
        an offset.
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
        """Return KL(t || s) = C_t / S_t - ln S_t + ln S_s, likewise KL(s || t), which is the residual.

        A shard's mean of d moves by the shift of both maxima and counts with its mass under the averaging
        model.
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
        """Return forward (s - t) + reverse s (ln s - ln t - KL(s || t))."""
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
class JensenShannon(Divergence):
    """beta KL(t || Q) + (1 - beta) KL(s || Q) with Q = beta t + (1 - beta) s, 0 < beta < 1.

    Source: the generalised Jensen-Shannon divergence of Agarwal et al. 2024 (On-Policy Distillation of
    Language Models, section 3).
    """

    beta: float

    def parts(self, log_t: Tensor, log_s: Tensor) -> list[Tensor]:
        log_q = self._log_mixture(log_t, log_s)
        return [kl_terms(log_t, log_q), kl_terms(log_s, log_q)]

    def value(self, sums: Tensor) -> Tensor:
        return self.beta * sums[0] + (1.0 - self.beta) * sums[1]

    def mean_slope(self, sums: Tensor) -> Tensor:
        return (1.0 - self.beta) * sums[1]

    def slope(self, log_t: Tensor, log_s: Tensor) -> Tensor:
        return (log_s - self._log_mixture(log_t, log_s)).mul_(1.0 - self.beta)

    def plain(self, log_t: Tensor, log_s: Tensor) -> Tensor:
        log_q = self._log_mixture(log_t, log_s)
        return self.beta * plain_kl(log_t, log_q) + (1.0 - self.beta) * plain_kl(log_s, log_q)

    def terms(self, student: ShardRows, teacher: ShardRows) -> Tensor:
        """Return this shard's parts of KL(t || Q) and KL(s || Q); only their sums are cut off at 0."""
        log_s, log_t = student.log_probabilities(), teacher.log_probabilities()
        log_q = self._log_mixture(log_t, log_s)
        return torch.stack([_signed_kl_terms(log, log_q).sum(dim=1) for log in (log_t, log_s)])

    def from_terms(self, terms: Tensor) -> tuple[Tensor, Tensor | None]:
        terms = terms.clamp(min=0.0)  # rounding alone makes them negative
        return self.value(terms), terms[1]

    def gradient(
        self, student: ShardRows, teacher: ShardRows, p_s: Tensor, residual: Tensor | None
    ) -> Tensor:
        """Return (1 - beta) s (ln s - ln Q - KL(s || Q)).

        The residual is subtracted before the factor is applied, not after.
        """
        log_s = student.log_probabilities()
        log_q = self._log_mixture(teacher.log_probabilities(), log_s)
        return log_s.sub_(log_q).sub_(residual[:, None]).mul_(p_s).mul_(1.0 - self.beta)

    def _log_mixture(self, log_t: Tensor, log_s: Tensor) -> Tensor:
        return log_mixture(log_t, log_s, self.beta)


@dataclass(frozen=True)
class SkewedForwardKL(Divergence):
    """KL(t || m) with m = alpha t + (1 - alpha) s, 0 < alpha < 1.

    Source: DistiLLM, Ko et al. 2024 (arXiv 2402.03898), section 3.1. The constant 1 - alpha is added to D, so
    that D vanishes at t = s and the gradient does not cancel there. Every D lies between -(1 - alpha)^2 /
    alpha and 1 - alpha.
    """

    alpha: float

    def parts(self, log_t: Tensor, log_s: Tensor) -> list[Tensor]:
        log_m = log_mixture(log_t, log_s, self.alpha)
        return [kl_terms(log_t, log_m), -log_s.exp() * torch.expm1(log_t - log_m)]

    def value(self, sums: Tensor) -> Tensor:
        return sums[0]

    def mean_slope(self, sums: Tensor) -> Tensor:
        return (1.0 - self.alpha) * sums[1]

    def slope(self, log_t: Tensor, log_s: Tensor) -> Tensor:
        return (log_t - log_mixture(log_t, log_s, self.alpha)).expm1_().mul_(self.alpha - 1.0)

    def plain(self, log_t: Tensor, log_s: Tensor) -> Tensor:
        return plain_kl(log_t, log_mixture(log_t, log_s, self.alpha))


@dataclass(frozen=True)
class SkewedReverseKL(Divergence):
    """KL(s || m) with m = (1 - alpha) t + alpha s, 0 < alpha < 1.

    Source: DistiLLM, Ko et al. 2024 (arXiv 2402.03898), section 3.1. With x = ln(s / m), at most -ln alpha,
    D = x - alpha expm1(x), which vanishes at t = s.
    """

    alpha: float

    def parts(self, log_t: Tensor, log_s: Tensor) -> list[Tensor]:
        log_m = self._log_mixture(log_t, log_s)
        return [kl_terms(log_s, log_m), log_s.exp() * self._slope(log_s - log_m)]

    def value(self, sums: Tensor) -> Tensor:
        return sums[0]

    def mean_slope(self, sums: Tensor) -> Tensor:
        return sums[1]  # summed from D itself, so that an error that all logarithms share cancels in D - mean

    def slope(self, log_t: Tensor, log_s: Tensor) -> Tensor:
        return self._slope(log_s - self._log_mixture(log_t, log_s))

    def plain(self, log_t: Tensor, log_s: Tensor) -> Tensor:
        return plain_kl(log_s, self._log_mixture(log_t, log_s))

    def _slope(self, x: Tensor) -> Tensor:
        return x - self.alpha * torch.expm1(x)

    def _log_mixture(self, log_t: Tensor, log_s: Tensor) -> Tensor:
        return log_mixture(log_t, log_s, 1.0 - self.alpha)


def log_mixture(log_t: Tensor, log_s: Tensor, share: float) -> Tensor:
    """Return ln(share t + (1 - share) s) for 0 < share < 1, a new tensor."""
    return torch.logaddexp(log_t + math.log(share), log_s + math.log1p(-share))


def kl_terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return p ln(p / q) + (q - p), never negative; over all classes the second part adds nothing.

    It makes an error that all logarithms of p share (that of its normaliser) vanish at first order. This
    matters where both distributions are alike. Close to p = q the term is p (x + expm1(-x)), x = ln(p / q),
    which does not cancel.
    """
    return _signed_kl_terms(log_p, log_q).clamp_(min=0.0)


def _signed_kl_terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return `kl_terms` with the negative numbers that rounding makes where p and q are nearly equal."""
    p, x = log_p.exp(), log_p - log_q
    near = p * (x + torch.expm1(-x))
    return torch.where(x.abs() < 1.0, near, p * x + (log_q.exp() - p))


def plain_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q) over the last dimension, by its definition."""
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


IMPLEMENTATIONS: dict[str, Callable[..., Divergence]] = {
    "forward_kl": lambda: KLMixture(1.0, 0.0),
    "reverse_kl": lambda: KLMixture(0.0, 1.0),
    "mixed_kl": lambda weight: KLMixture(weight, 1.0 - weight),
    "jsd": JensenShannon,
    "skewed_forward_kl": SkewedForwardKL,
    "skewed_reverse_kl": SkewedReverseKL,
}
"""Name -> the divergence, from its parameter if it has one."""


def build_divergence(name: str, parameter: float | None = None) -> Divergence:
    """Return the divergence of this name; its parameter defaults to that of its declaration.

    Raises UsageError for an unknown name, a parameter that the divergence does not have, or one out of range.
    """
    if name not in DECLARATIONS:
        what, do = f"kd-divergence is {name!r}", f"choose one of: {', '.join(sorted(DECLARATIONS))}"
        raise UsageError(what, "mkd has no such divergence", do, code="value-unknown")
    declared = DECLARATIONS[name].parameter
    if declared is None:
        if parameter is not None:
            what = f"kd-divergence {name} is given the parameter {parameter}"
            raise UsageError(what, "it has none", "remove it", code="remove-flag")
        return IMPLEMENTATIONS[name]()
    parameter = declared.default if parameter is None else parameter
    if not declared.is_valid(parameter):
        what = f"kd-{declared.name.replace('_', '-')} is {parameter}"
        do = f"choose a value {declared.valid}"
        raise UsageError(what, declared.help, do, code="out-of-range")
    resolved = DivergenceSettings(name, parameter).resolved()
    return build_divergence(resolved.name) if resolved.name != name else IMPLEMENTATIONS[name](parameter)
