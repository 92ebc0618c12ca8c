"""The proof of a checkpoint must not make a save slower than Megatron's own, which proves nothing."""

from __future__ import annotations

import pytest

from tests.checkpoint.save_cost import line, medians

MEGABYTES = 256  # a rank
BOUND = 1.0  # of Megatron's seconds: docs/decisions/2026-11-22-what-a-proof-costs.md


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_costs_no_more_than_megatrons(ranks, tmp_path):
    seconds = medians(ranks, tmp_path, MEGABYTES)
    print(line(ranks, MEGABYTES, seconds))
    assert seconds["proven"] <= BOUND * seconds["by Megatron"]
