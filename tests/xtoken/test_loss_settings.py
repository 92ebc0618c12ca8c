"""Values that make no loss."""

from __future__ import annotations

import pytest

from mkd.errors import UsageError
from mkd.xtoken.loss_settings import ChunkLossSettings


@pytest.mark.parametrize(
    "setting",
    [
        dict(loss="kl"),
        dict(temperature=0.0),
        dict(temperature=float("inf")),
        dict(temperature_scaling="cubed"),
        dict(top_k=0),
    ],
)
def test_refused(setting):
    name = next(iter(setting)).split("_")[0]
    with pytest.raises(UsageError, match=name) as error:
        ChunkLossSettings(**setting)
    assert error.value.why and error.value.do


def test_weights_of_the_hybrid_losses():
    assert ChunkLossSettings(loss="gold").hybrid_weights(0.25) == (0.25, 0.75)
    assert ChunkLossSettings(loss="h_kl").hybrid_weights(0.25) == (1.0, 1.0)


def test_scale():
    assert ChunkLossSettings(temperature=3.0).scale == 9.0
    assert ChunkLossSettings(temperature=3.0, temperature_scaling="none").scale == 1.0
