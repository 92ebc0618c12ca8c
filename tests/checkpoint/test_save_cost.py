"""Check the cost of a checkpoint's proof.

It takes at most a tenth of a save, and a save takes no longer than Megatron's own, which proves nothing.
"""

from __future__ import annotations

from statistics import median

import pytest

from tests.checkpoint.save_cost import line, seconds_by_arm, share_of_proof

MEGABYTES = 256  # per rank


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_hashing_and_fsync_are_a_small_part_of_a_save(ranks, tmp_path):
    seconds = seconds_by_arm(ranks, tmp_path, MEGABYTES)
    print(line(ranks, MEGABYTES, seconds))
    assert share_of_proof(seconds) <= 0.1
    assert median(seconds["proven"]) <= median(seconds["by Megatron"])
