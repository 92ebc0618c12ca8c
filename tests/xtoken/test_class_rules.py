"""Slopes of the divergences against autograd, and their behaviour at the ends."""

from __future__ import annotations

import pytest
import torch

from mkd.xtoken.chunk_reference import divergence as dense_divergence
from mkd.xtoken.class_rules import KLRule, kl_terms, rule_of
from mkd.xtoken.loss_settings import DIVERGENCES, ChunkLossSettings


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_values_and_slopes(divergence):
    generator = torch.Generator().manual_seed(0)
    settings = ChunkLossSettings(divergence=divergence, jsd_beta=0.2, mixed_kl_weight=0.6)
    rule = rule_of(settings)
    for scale in (0.1, 1.0, 8.0):
        z, y = (scale * torch.randn(9, generator=generator, dtype=torch.float64) for _ in range(2))
        z.requires_grad_()
        log_s, log_t = torch.log_softmax(z, dim=0), torch.log_softmax(y, dim=0)
        wanted = dense_divergence(log_s.exp(), log_t.exp(), settings)
        wanted.backward()
        log_s = log_s.detach()
        sums = torch.stack([part.sum() for part in rule.parts(log_t, log_s)])
        mean = rule.mean_slope(sums)
        torch.testing.assert_close(rule.value(sums), wanted.detach())
        torch.testing.assert_close(rule.mass_slope(log_t, log_s) - log_s.exp() * mean, z.grad)
        torch.testing.assert_close(log_s.exp() * (rule.slope(log_t, log_s) - mean), z.grad)


def test_ends_of_the_jsd_scale_are_the_two_kls():
    assert rule_of(ChunkLossSettings(divergence="jsd", jsd_beta=0.0)) == KLRule(1.0, 0.0)
    assert rule_of(ChunkLossSettings(divergence="jsd", jsd_beta=1.0)) == KLRule(0.0, 1.0)


def test_terms_are_exact_where_distributions_are_close():
    p = torch.tensor([0.3, 0.7])
    q = torch.tensor([0.3 + 1e-5, 0.7 - 1e-5])
    exact = (p.double() * (p.double() / q.double()).log() + q.double() - p.double()).sum()
    assert abs(kl_terms(p.log(), q.log()).sum() / exact - 1) < 2e-2  # an uncentred sum is off by its own size
    assert (kl_terms(p.log(), p.log()) == 0).all()
