"""Values that make no loss."""

from __future__ import annotations

import pytest

from mkd.errors import UsageError
from mkd.xtoken.loss_settings import ChunkLossSettings
from tests.reported import refused


@pytest.mark.parametrize(
    ("setting", "code"),
    [
        (dict(loss="kl"), "value-unknown"),
        (dict(temperature=0.0), "out-of-range: choose a finite value above 0"),
        (dict(temperature=float("inf")), "out-of-range: choose a finite value above 0"),
        (dict(temperature_scaling="cubed"), "value-unknown"),
        (dict(top_k=0), "out-of-range: xtoken top-k is"),
    ],
)
def test_refused(setting, code):
    with refused(code, UsageError):
        ChunkLossSettings(**setting)


def test_weights_of_the_hybrid_losses():
    assert ChunkLossSettings(loss="gold").hybrid_weights(0.25) == (0.25, 0.75)
    assert ChunkLossSettings(loss="h_kl").hybrid_weights(0.25) == (1.0, 1.0)


def test_scale():
    assert ChunkLossSettings(temperature=3.0).scale == 9.0
    assert ChunkLossSettings(temperature=3.0, temperature_scaling="none").scale == 1.0
