"""Measure time and memory of calls for which both are known."""

from __future__ import annotations

import gc
import time

import torch

from tools.benchmarks.host_times import step_profile
from tools.benchmarks.kernel_times import covered
from tools.benchmarks.measure import Arm, peak_bytes, time_arms

CPU = torch.device("cpu")


def test_arms_take_turns_and_preparation_is_not_timed():
    calls = []
    arms = [
        Arm("a", lambda: calls.append("a"), lambda: time.sleep(0.02)),
        Arm("b", lambda: (calls.append("b"), time.sleep(0.005))),
    ]
    times = time_arms(arms, CPU, rounds=3, warmup=1)
    rounds = [calls[i : i + 2] for i in range(0, 8, 2)]
    assert all(sorted(pair) == ["a", "b"] for pair in rounds)
    assert ["a", "b"] in rounds and ["b", "a"] in rounds, "no arm always follows the same one"
    assert times["a"] < 5 <= times["b"]


def test_peak_counts_what_lives_at_the_same_time():
    there = torch.randn(1000)

    def run() -> torch.Tensor:
        two = there + 1, there + 2  # 8,000 bytes
        both = two[0] + two[1]  # 12,000
        del two
        return both * 2  # 8,000 again

    assert peak_bytes(Arm("a", run), CPU) == 12_000


def test_views_and_in_place_results_are_not_new_memory():
    there = torch.randn(1000)
    assert peak_bytes(Arm("a", lambda: there.view(10, 100).t().mul_(2)), CPU) == 0


def test_peak_of_a_backward_pass():
    """exp keeps its result, 4,000 bytes; its gradient and the expanded gradient of the sum add up."""
    leaf = torch.randn(1000, requires_grad=True)
    peak = peak_bytes(Arm("a", lambda: torch.autograd.grad(leaf.exp().sum(), leaf)), CPU)
    assert 8_000 <= peak <= 8_100


def test_profile_of_a_step():
    a = torch.ones(64, 64)

    def step():
        for _ in range(3):
            torch.mm(a, a)
        gc.collect()

    profile = step_profile(step, is_cuda=False)
    assert dict((name, calls) for name, _, calls in profile.operations)["aten::mm"] == 3
    assert len(profile.collections.ms) == 1 and 0 < sum(profile.collections.ms) < profile.wall_ms
    assert 0 < profile.kernels.busy_ms <= sum(profile.kernels.by_kind.values())
    assert "garbage collections: 1 in" in profile.describe("a step")


def test_time_in_which_kernels_run():
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 1.5), (1.0, 3.0)]) == 4.0 and covered([]) == 0.0
