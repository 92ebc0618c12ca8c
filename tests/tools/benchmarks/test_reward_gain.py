"""Check the demonstrations of sums, and what the checker accepts."""

from __future__ import annotations

import pytest

from tools.benchmarks.arithmetic_reward import exact
from tools.benchmarks.reward_gain import partial_sums


def test_partial_sums_end_with_the_answer():
    assert partial_sums("4 - 10 - 7 + 25 =") == "\n-6\n-13\n12"


@pytest.mark.parametrize(
    "completion, reward",
    [(" 12", 1), ("\n-6\n-13\n12", 1), ("\n12\n13", 0), (" 12.", 0), (" -12", 0), ("", 0)],
)
def test_the_last_number_counts(completion, reward):
    assert exact("4 - 10 - 7 + 25 =", completion, {"answer": "12"}) == reward
