"""Check plans of teacher forwards ahead of the student against a table, and for every small size."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from mkd.errors import UsageError
from mkd.plan.times.prefetch import RankWork, candidates, ideal_ms, student_order
from mkd.plan.times.prefetch_replay import plan_prefetch, replay


def equal_ranks(ranks: int, ratio: float) -> list[RankWork]:
    """Return ranks whose teacher takes `ratio` times as long as the student's forward and backward."""
    return [RankWork(3 * ratio, 1.0, 2.0)] * ranks


def test_the_student_keeps_the_order_of_1f1b():
    assert student_order(0, 4, 5) == "FFFFBFBBBB" and student_order(3, 4, 2) == "FBFB"
    assert student_order(1, 4, 1) == "FB"


@pytest.mark.parametrize(
    ("ranks", "microbatches", "ratio", "ahead", "expected"),
    [
        (2, 4, 1, 2, 1.04),
        (2, 4, 1, 4, 1.00),
        (4, 8, 0.5, 8, 1.07),
        (4, 8, 1, 4, 1.10),
        (4, 8, 1, 8, 1.06),
        (4, 16, 1, 8, 1.02),
        (8, 16, 1, 16, 1.08),
    ],
)
def test_the_step_over_the_ideal_one(ranks, microbatches, ratio, ahead, expected):
    """The figures are of another simulation, in which sends do not wait. Without a plan: 1 + (p - 1) / m."""
    work = equal_ranks(ranks, ratio)
    plan, step_ms = plan_prefetch(tuple(work), microbatches, ahead)
    assert expected - 0.02 < step_ms / ideal_ms(work, microbatches) < expected + 0.008
    assert max(plan.held) <= ahead and step_ms == replay(plan, work)


def test_a_slow_rank_sets_the_pace():
    work = [RankWork(3, 1, 2), RankWork(3, 1, 2), RankWork(1, 4, 2), RankWork(2, 3, 2)]
    plan, step_ms = plan_prefetch(tuple(work), 16, 8)
    assert 16 * 7 == ideal_ms(work, 16) <= step_ms <= 1.15 * 16 * 7
    assert all(order.count("T") == 16 for order in plan.orders)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_some_sizes_have_a_plan_that_gets_through(ranks):
    chance = random.Random(ranks)
    check_sizes(ranks, chance.sample(every_size(ranks), 30), chance)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(2, 9))
def test_every_size_has_a_plan_that_gets_through(ranks):
    check_sizes(ranks, every_size(ranks), random.Random(ranks))


def every_size(ranks: int) -> list[tuple[int, int]]:
    """Return (micro-batches, states ahead), up to 32 and 4 p."""
    return [(microbatches, ahead) for microbatches in range(1, 33) for ahead in range(1, 4 * ranks + 1)]


def check_sizes(ranks: int, sizes: list[tuple[int, int]], chance: random.Random) -> None:
    """Replay plans of each size with random times until one gets through, and this one with other times."""
    for microbatches, ahead in sizes:
        work, other = ([RankWork(*random_times(chance)) for _ in range(ranks)] for _ in range(2))
        plan, step_ms = next(timed_plans(work, microbatches, ahead))
        assert max(plan.held) <= ahead and step_ms >= 0.999 * ideal_ms(work, microbatches)
        assert replay(plan, other) > 0, "it gets through however long anything takes"


def timed_plans(work: list[RankWork], microbatches: int, ahead: int):
    """Yield (plan, milliseconds of a step), without the plans that a replay refuses."""
    for _, plan in candidates(work, microbatches, ahead):
        with suppress(UsageError):
            yield plan, replay(plan, work)


def random_times(chance: random.Random) -> list[float]:
    return [chance.uniform(0.2, 4) for _ in range(3)]
