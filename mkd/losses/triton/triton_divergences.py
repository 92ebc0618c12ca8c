"""The formulas of `divergences.py` for Triton kernels, over vocabulary shards and classes of aligned chunks.

A divergence class has kernels if it is registered in `FORMULAS`; any other one runs in torch passes on GPUs
too. A new formula needs an unused number (KIND), a branch in each of the four functions that take one, and an
entry in `FORMULAS`.

Legend: a = log2 s and b = log2 t, tiles or blocks of fp32; `first` and `second` are the two numbers of a
`Formula`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import triton
import triton.language as tl
from triton.language.extra import libdevice

from mkd.losses.divergence_base import Divergence
from mkd.losses.divergences import JensenShannon, KLMixture, SkewedForwardKL, SkewedReverseKL

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
KL, JENSEN_SHANNON, SKEWED_FORWARD, SKEWED_REVERSE = (tl.constexpr(kind) for kind in range(4))


@dataclass(frozen=True)
class Formula:
    """The arguments that make a kernel compute one divergence."""

    kind: int
    first: float  # KL: weight of the forward KL; others: share of the teacher in the mixture
    second: float  # KL: weight of the reverse KL; skewed KLs: alpha
    # True if `parts` has a first and a second one; with two KLs, those of non-zero weight.
    has_first: bool = True
    has_second: bool = True

    @property
    def switches(self) -> dict[str, int | bool]:
        """Compile-time arguments of the kernels."""
        return dict(KIND=self.kind, FIRST=self.has_first, SECOND=self.has_second)


def _kl_mixture(divergence: KLMixture) -> Formula:
    forward, reverse = divergence.forward, divergence.reverse
    return Formula(KL.value, forward, reverse, forward != 0.0, reverse != 0.0)


FORMULAS: Mapping[type[Divergence], Callable[..., Formula]] = MappingProxyType(
    {
        KLMixture: _kl_mixture,
        JensenShannon: lambda divergence: Formula(JENSEN_SHANNON.value, divergence.beta, 0.0),
        SkewedForwardKL: lambda divergence: Formula(SKEWED_FORWARD.value, divergence.alpha, divergence.alpha),
        SkewedReverseKL: lambda divergence: Formula(
            SKEWED_REVERSE.value, 1.0 - divergence.alpha, divergence.alpha
        ),
    }
)


def formula_of(divergence: Divergence) -> Formula:
    """Return the formula of a divergence whose class is in `FORMULAS`."""
    return FORMULAS[type(divergence)](divergence)


@triton.jit
def shard_terms(a, b, first, second, KIND: tl.constexpr):
    """Return each lane's sums over a tile of `Divergence.terms`, divided by ln 2."""
    if KIND == JENSEN_SHANNON:
        # p log2(p / Q) + (Q - p) / ln 2; over the whole vocabulary Q - p adds nothing: see `kl_terms`
        p_s, p_t, log_q = mixture(a, b, first)
        q = first * p_t + (1.0 - first) * p_s
        one = p_t * (b - log_q) + (q - p_t) * LOG2E
        two = p_s * (a - log_q) + (q - p_s) * LOG2E
    else:
        one, two = class_parts(a, b, first, second, KIND, True, True)
        one, two = one * LOG2E, two * LOG2E
    return tl.sum(one, axis=1), tl.sum(two, axis=1)


@triton.jit
def shard_gradient(
    a, b, residual, first, second, KIND: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr
):
    """Return (`Divergence.gradient`, s) of a block of columns; `residual` is that of the row."""
    if KIND == JENSEN_SHANNON:
        p_s, _p_t, log_q = mixture(a, b, first)
        gradient = (1.0 - first) * p_s * ((a - log_q) * LN2 - residual)
    elif KIND == KL:
        p_s = tl.exp2(a)
        gradient = tl.zeros_like(a)
        if FIRST:
            gradient += first * (p_s - tl.exp2(b))
        if SECOND:
            gradient += second * p_s * ((a - b) * LN2 - residual)
    else:
        p_s = tl.exp2(a)
        gradient = class_mass_slope(a, b, p_s, first, second, KIND) - p_s * residual
    return gradient, p_s


@triton.jit
def class_parts(a, b, first, second, KIND: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Return the summands of `Divergence.parts`, two of them; 0 for one that the divergence does not have."""
    one, two = tl.zeros_like(a), tl.zeros_like(a)
    if KIND == JENSEN_SHANNON:
        _p_s, _p_t, log_q = mixture(a, b, first)
        one, two = kl_terms(b, log_q), kl_terms(a, log_q)
    if KIND == SKEWED_FORWARD:
        p_s, _p_t, log_m = mixture(a, b, first)
        one, two = kl_terms(b, log_m), -p_s * expm1((b - log_m) * LN2)
    if KIND == SKEWED_REVERSE:
        p_s, _p_t, log_m = mixture(a, b, first)
        x = (a - log_m) * LN2
        one, two = kl_terms(a, log_m), p_s * (x - second * expm1(x))
    if KIND == KL:
        if FIRST:
            one = kl_terms(b, a)
        if SECOND:
            two = kl_terms(a, b)
    return one, two


@triton.jit
def class_mass_slope(a, b, p_s, first, second, KIND: tl.constexpr):
    """Return s D as `Divergence.mass_slope` does."""
    if KIND == JENSEN_SHANNON:
        _p_s, _p_t, log_q = mixture(a, b, first)
        slope = p_s * (a - log_q) * LN2 * (1.0 - first)
    elif KIND == SKEWED_FORWARD:
        _p_s, _p_t, log_m = mixture(a, b, first)
        slope = -(1.0 - second) * p_s * expm1((b - log_m) * LN2)
    elif KIND == SKEWED_REVERSE:
        _p_s, _p_t, log_m = mixture(a, b, first)
        x = (a - log_m) * LN2
        slope = p_s * (x - second * expm1(x))
    else:
        slope = second * p_s * (a - b) * LN2 - first * tl.exp2(b)
    return slope


@triton.jit
def mixture(a, b, share):
    """Return (s, t, log2(share t + (1 - share) s)).

    The larger probability is factored out: the fast logarithm then sees values between min(share, 1 - share)
    and 1 only, where its error is absolute, below 2e-7.
    """
    teacher_leads = b >= a
    larger = tl.maximum(a, b)
    ratio = tl.exp2(tl.minimum(a, b) - larger)
    p_larger = tl.exp2(larger)
    p_smaller = p_larger * ratio
    weight = tl.where(teacher_leads, share, 1.0 - share)
    log_q = larger + libdevice.fast_log2f(weight + (1.0 - weight) * ratio)
    return tl.where(teacher_leads, p_smaller, p_larger), tl.where(teacher_leads, p_larger, p_smaller), log_q


@triton.jit
def expm1(x):
    """Return e^x - 1; close to 0 by its series, whose next term is below 1e-9 at |x| < 0.25."""
    y = tl.where(tl.abs(x) < 0.25, x, 0.0)
    series = y * (
        1.0 + y * (1.0 / 2 + y * (1.0 / 6 + y * (1.0 / 24 + y * (1.0 / 120 + y * (1.0 / 720 + y / 5040)))))
    )
    return tl.where(tl.abs(x) < 0.25, series, tl.exp2(x * LOG2E) - 1.0)


@triton.jit
def kl_terms(a, b):
    """Return p ln(p / q) + (q - p) from a = log2 p and b = log2 q; nothing cancels near p = q.

    It equals `divergences.kl_terms`. Near p = q it is p (x + expm1(-x)), x = ln(p / q), by the series of the
    exponential: at |x| < 1 its next term is below 1e-9.
    """
    p, x = tl.exp2(a), (a - b) * LN2
    y = tl.where(tl.abs(x) < 1.0, x, 0.0)
    tail = 1.0 / 5040 - y * (1.0 / 40320 - y * (1.0 / 362880 - y * (1.0 / 3628800 - y / 39916800)))
    series = y * y * (0.5 - y * (1.0 / 6 - y * (1.0 / 24 - y * (1.0 / 120 - y * (1.0 / 720 - y * tail)))))
    far = p * x + (tl.exp2(b) - p)
    return tl.maximum(tl.where(tl.abs(x) < 1.0, p * series, far), 0.0)
