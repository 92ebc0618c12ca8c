"""Each divergence against autograd of its formula, near equal distributions, at the ends of its parameter.

The errors for unknown names and parameters are here too.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from mkd.config.divergence import DECLARATIONS, DIVERGENCES, DivergenceSettings
from mkd.errors import UsageError
from mkd.losses import KDObjective, build_divergence, torch_rows, vocab_parallel
from mkd.losses.divergence_base import Divergence
from mkd.losses.divergences import (
    IMPLEMENTATIONS,
    JensenShannon,
    KLMixture,
    SkewedForwardKL,
    SkewedReverseKL,
    kl_terms,
)
from mkd.losses.vocab_parallel import passes_for, use_triton
from tests.reported import refused


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p * (p / q).log()).sum(dim=-1)


def jsd(t: torch.Tensor, s: torch.Tensor, x: float) -> torch.Tensor:
    q = x * t + (1 - x) * s
    return x * kl(t, q) + (1 - x) * kl(s, q)


FORMULAS = {
    "forward_kl": lambda t, s, x: kl(t, s),
    "reverse_kl": lambda t, s, x: kl(s, t),
    "mixed_kl": lambda t, s, x: x * kl(t, s) + (1 - x) * kl(s, t),
    "jsd": jsd,
    "skewed_forward_kl": lambda t, s, x: kl(t, x * t + (1 - x) * s),
    "skewed_reverse_kl": lambda t, s, x: kl(s, (1 - x) * t + x * s),
}
"""Name -> the divergence of probabilities t (teacher) and s (student) with the parameter x."""


def parameters_of(name: str) -> tuple[float | None, ...]:
    return (None,) if DECLARATIONS[name].parameter is None else (0.1, 0.2, 0.5, 0.7)


CASES = [(name, parameter) for name in DIVERGENCES for parameter in parameters_of(name)]


def test_every_declared_divergence_is_implemented_and_tested():
    assert IMPLEMENTATIONS.keys() == DECLARATIONS.keys() == FORMULAS.keys()


@pytest.mark.parametrize(("name", "parameter"), CASES)
def test_values_and_slopes(name, parameter):
    generator = torch.Generator().manual_seed(0)
    rule = build_divergence(name, parameter)
    for scale in (0.1, 1.0, 8.0):
        z, y = (scale * torch.randn(9, generator=generator, dtype=torch.float64) for _ in range(2))
        z.requires_grad_()
        log_s, log_t = torch.log_softmax(z, dim=0), torch.log_softmax(y, dim=0)
        wanted = FORMULAS[name](log_t.exp(), log_s.exp(), parameter)
        wanted.backward()
        log_s = log_s.detach()
        sums = torch.stack([part.sum() for part in rule.parts(log_t, log_s)])
        mean = rule.mean_slope(sums)
        torch.testing.assert_close(rule.value(sums), wanted.detach())
        torch.testing.assert_close(rule.plain(log_t, log_s), wanted.detach())
        torch.testing.assert_close(rule.mass_slope(log_t, log_s) - log_s.exp() * mean, z.grad)
        torch.testing.assert_close(log_s.exp() * (rule.slope(log_t, log_s) - mean), z.grad)


@pytest.mark.parametrize(("name", "parameter"), CASES)
@pytest.mark.parametrize("noise", [0.0, 1e-6, 1e-3, 1e-1])
def test_nearly_equal_distributions_do_not_cancel(name, parameter, noise):
    """In fp32 no value is negative, and values and gradients equal those of fp64.

    Both read the same log-probabilities.
    """
    generator = torch.Generator().manual_seed(1)
    z = 3 * torch.randn(20, 1000, generator=generator)
    y = z + noise * torch.randn(z.shape, generator=generator)
    log_s, log_t = torch.log_softmax(z, dim=1), torch.log_softmax(y, dim=1)
    rule, results = build_divergence(name, parameter), []
    for dtype in (torch.float32, torch.float64):
        t, s = log_t.to(dtype), log_s.to(dtype)
        sums = torch.stack([part.sum(dim=1) for part in rule.parts(t, s)])
        gradient = rule.mass_slope(t, s) - s.exp() * rule.mean_slope(sums)[:, None]
        results.append((rule.value(sums), gradient))
    (value, gradient), (exact, exact_gradient) = results
    assert value.min() >= 0.0
    torch.testing.assert_close(value.double(), exact, rtol=1e-2, atol=1e-9)
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=1e-4, atol=2e-7)


@pytest.mark.parametrize(("name", "parameter"), CASES)
def test_slopes_are_finite_where_probabilities_underflow(name, parameter):
    log_t, log_s = torch.tensor([0.0, -200.0, -1e4, -1e30]), torch.tensor([-1e4, 0.0, -300.0, -1e30])
    rule = build_divergence(name, parameter)
    for found in (*rule.parts(log_t, log_s), rule.slope(log_t, log_s), rule.mass_slope(log_t, log_s)):
        assert found.isfinite().all()


def test_ends_of_the_jsd_scale_are_the_two_kls():
    assert build_divergence("jsd", 0.0) == build_divergence("forward_kl") == KLMixture(1.0, 0.0)
    assert build_divergence("jsd", 1.0) == build_divergence("reverse_kl") == KLMixture(0.0, 1.0)
    assert DivergenceSettings("jsd", 1.0).formula() == DivergenceSettings("reverse_kl").formula()


def test_skewed_kls_without_skew_are_the_plain_kls():
    assert build_divergence("skewed_forward_kl", 0.0) == build_divergence("forward_kl")
    assert build_divergence("skewed_reverse_kl", 0.0) == build_divergence("reverse_kl")
    assert build_divergence("skewed_reverse_kl") == SkewedReverseKL(0.1)


def test_slopes_of_skewed_kls_are_bounded_where_those_of_plain_kls_are_not():
    log_t, log_s = torch.tensor([0.0, -80.0]), torch.tensor([-80.0, 0.0])
    alpha = 0.1
    slope = SkewedForwardKL(alpha).slope(log_t, log_s)
    torch.testing.assert_close(slope, torch.tensor([-((1 - alpha) ** 2) / alpha, 1 - alpha]))
    slope = SkewedReverseKL(alpha).slope(log_t, log_s)
    assert slope[1] == pytest.approx(-math.log(alpha) - alpha * (1 / alpha - 1), rel=1e-6)


def test_terms_are_exact_where_distributions_are_close():
    p = torch.tensor([0.3, 0.7])
    q = torch.tensor([0.3 + 1e-5, 0.7 - 1e-5])
    exact = (p.double() * (p.double() / q.double()).log() + q.double() - p.double()).sum()
    assert abs(kl_terms(p.log(), q.log()).sum() / exact - 1) < 2e-2  # an uncentred sum is off by its own size
    assert (kl_terms(p.log(), p.log()) == 0).all()


@pytest.mark.parametrize(
    ("name", "parameter", "code"),
    [
        ("tvd", None, "value-unknown: kd-divergence is"),
        ("forward_kl", 0.5, "remove-flag: is given the parameter"),
        ("jsd", 1.5, "out-of-range"),
        ("mixed_kl", -0.1, "out-of-range"),
        ("jsd", float("nan"), "out-of-range"),
        ("skewed_forward_kl", 1.0, "out-of-range"),
        ("skewed_reverse_kl", -0.1, "out-of-range"),
    ],
)
def test_refused(name, parameter, code):
    with refused(code, UsageError):
        build_divergence(name, parameter)


@dataclass(frozen=True)
class Unknown(JensenShannon):
    """A divergence that no kernel computes."""


@pytest.mark.parametrize(
    ("divergence", "has_kernels"), [(KLMixture(1.0, 0.0), True), (Unknown(0.5), False), (None, True)]
)
def test_divergences_without_kernels_run_in_torch_passes_on_gpus(divergence, has_kernels, monkeypatch):
    known = SimpleNamespace(FORMULAS={KLMixture: None, JensenShannon: None})
    rows = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "mkd.losses.triton.triton_divergences", known)
    monkeypatch.setitem(sys.modules, "mkd.losses.triton.triton_rows", rows)
    monkeypatch.setattr(sys.modules["mkd.losses"], "triton_rows", rows, raising=False)
    monkeypatch.setattr(vocab_parallel, "_has_triton", lambda: True)
    logits = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    assert use_triton(logits, divergence) is has_kernels
    if isinstance(divergence, Divergence):
        passes = passes_for(logits, KDObjective(10, 10, divergence=divergence))
        assert (passes is torch_rows) is not has_kernels
        alone = KDObjective(10, kd_ratio=0.0, divergence=divergence)
        assert passes_for(logits, alone) is rows, "the cross entropy has kernels"
