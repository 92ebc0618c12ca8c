"""Check the figures of completions, and the warning about those without an end."""

from __future__ import annotations

import numpy as np
import pytest

from mkd.kinds.sampled.rollout_figures import (
    FLAT_STEPS,
    FlatRewardWatch,
    TruncationWatch,
    figures,
    repetition,
)
from mkd.kinds.sampled.sampler.rollouts import LENGTH, STOP, Request, Rollout


def rollout(ids: list[int], finish: str) -> Rollout:
    values = np.full(len(ids), 0.5, dtype=np.float32)
    return Rollout(Request(0, 0, np.array([1])), np.array(ids), -values, values, finish)


def test_figures():
    found = figures(
        [rollout([1, 2, 3, 4, 1, 2, 3, 4, 1], LENGTH), rollout([7], STOP), rollout([5, 7], STOP)], 3.5
    )
    assert found == {
        "rollout/length": 4.0,
        "rollout/truncated": pytest.approx(1 / 3),
        "rollout/repetition": pytest.approx((2 / 6) / 3),
        "rollout/entropy": 0.5,
        "rollout/version_lag": 0.0,
        "rollout/time_ms": 3.5,
    }
    assert repetition(np.array([4] * 10)) == pytest.approx(6 / 7)


def test_the_warning_comes_once_until_completions_end_again(caplog):
    watch = TruncationWatch()
    for iteration, truncated in enumerate((0.5, 0.6, 0.9, 0.2, 0.7), 1):
        watch.judge(iteration, truncated, 64)
    warned = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in warned] == ["iteration 2", "iteration 5"]


def test_rewards_that_never_differ_are_warned_of_once_until_they_do(caplog):
    watch, flat = FlatRewardWatch(), [1.0] * FLAT_STEPS
    for iteration, share in enumerate([*flat[1:], 0.9, *flat, 1.0, None, 0.0, *flat], 1):
        watch.judge(iteration, share, None if share is None else 0.25)
    said = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in said] == [f"iteration {one}" for one in (20, 33)]
    assert all("same reward (mean 0.25)" in text for text in said)
