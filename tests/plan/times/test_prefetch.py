"""Check plans of teacher forwards ahead of the student: by hand, and for every small size."""

from __future__ import annotations

import random
from functools import cache

import pytest

from mkd.errors import UsageError
from mkd.plan.times.prefetch import (
    LEAST_HELD,
    Boundary,
    PrefetchPlan,
    RankGaps,
    RankWork,
    ending,
    every_rank,
    ideal_ms,
    stops,
    student_order,
)
from mkd.plan.times.prefetch_search import candidates, plan_prefetch, step_ms
from tests.reported import Reported

WORK = [RankWork(teacher_ms=3.0, forward_ms=1.0, backward_ms=2.0)] * 2


def equal_ranks(ranks: int, ratio: float) -> tuple[RankWork, ...]:
    """Return ranks whose teacher takes `ratio` times as long as the student's forward and backward."""
    return (RankWork(3 * ratio, 1.0, 2.0),) * ranks


def plan_of(*orders: str, start: int = 0, stagger: int = 1) -> PrefetchPlan:
    return PrefetchPlan(Boundary(start, stagger), orders[0].count("F"), orders, ahead=4)


def test_the_student_keeps_the_order_of_1f1b():
    assert student_order(0, 4, 5) == "FFFFBFBBBB" and student_order(3, 4, 2) == "FBFB"
    assert student_order(1, 4, 1) == "FB"


@pytest.mark.parametrize("ranks", range(2, 9))
def test_neighbours_come_to_their_exchanges_in_one_order(ranks):
    """Each is posted by both, once, in the order of its numbers, with what Megatron sends there."""
    for microbatches in range(1, 20):
        every = [stops(rank, ranks, microbatches) for rank in range(ranks)]
        for link in range(ranks - 1):
            numbers = list(range(microbatches + min(ranks - 1 - link, microbatches)))
            for rank in (link, link + 1):
                assert [one.number for one in every[rank] if one.link == link] == numbers
        assert {one.task for one in every[-1] if one.task and not one.has_gap} == {"B"}


@pytest.mark.parametrize(
    ("plan", "expected_ms"),
    [
        # Rank 1 has its second input at 4, and its first backward ends at 7. Its second loss comes at 11, so
        # that rank 0 waits until 13 for its last backward.
        (plan_of("TFFBTB", "TFBTFB"), 15.0),
        # Both are ahead. Rank 0 makes both states behind its last exchange, so that rank 1 has them at 14.
        (plan_of("FFBTTB", "FBTFBT", start=1), 17.0),
        # One of them goes with the last exchange, at 10.
        (plan_of("FFTBTB", "FBTFBT", start=1), 13.0),
    ],
)
def test_steps_counted_by_hand(plan, expected_ms):
    assert step_ms(plan, WORK) == expected_ms


@pytest.mark.parametrize(
    "orders",
    [
        ("TFFBTB", "TFTBFB"),  # work between the loss and its backward, where a run has no gap
        ("FTFBTB", "TFBTFB"),  # rank 1's second input goes with the second forward, behind the gap before it
        ("TFFBTB", "FBTTFB"),  # the loss of the first micro-batch comes before its teacher
        ("TFBTFB", "TFBTFB"),  # not the order of 1F1B
        ("TFFBB", "TFBTFB"),  # a forward of the teacher is missing
    ],
)
def test_a_wrong_order_is_refused(orders):
    with pytest.raises(UsageError) as caught:
        step_ms(plan_of(*orders), WORK)
    assert Reported.of(caught.value) == "teacher-prefetch-not-possible: the plan of teacher forwards ahead"


def test_the_work_of_a_rank():
    plan = plan_of("TFFBTB", "TFBTFB")
    assert RankGaps.from_plan(plan, 0) == RankGaps(1, 0, (1, 0, 0, 1), (), (1, 0, 0), most_held=1, ahead=4)
    assert RankGaps.from_plan(plan, 1) == RankGaps(0, 1, (1, 1), (1, 0, 0), (), most_held=2, ahead=4)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "ratio", "ahead", "most"),
    [
        (2, 4, 1, 4, 1.00),
        (4, 8, 0.5, 8, 1.09),
        (4, 8, 1, 4, 1.10),
        (4, 8, 1, 8, 1.05),
        (4, 16, 1, 8, 1.03),
        (8, 16, 1, 16, 1.11),
        (8, 32, 1, 16, 1.04),
    ],
)
def test_the_step_over_the_ideal_one(ranks, microbatches, ratio, ahead, most):
    """Without teachers ahead: 1 + (p - 1) / m."""
    work = equal_ranks(ranks, ratio)
    plan, found_ms = plan_prefetch(work, microbatches, ahead)
    assert 1 <= found_ms / ideal_ms(work, microbatches) <= most
    assert max(one.most_held for one in every_rank(plan)) <= ahead


def test_a_slow_rank_sets_the_pace():
    work = (RankWork(3, 1, 2), RankWork(3, 1, 2), RankWork(1, 4, 2), RankWork(2, 3, 2))
    plan, found_ms = plan_prefetch(work, 16, 8)
    assert 16 * 7 == ideal_ms(work, 16) <= found_ms <= 1.15 * 16 * 7
    assert all(order.count("T") == 16 for order in plan.orders)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_some_sizes_have_a_plan(ranks):
    chance = random.Random(ranks)
    check_sizes(ranks, chance.sample(every_size(ranks), 30), chance)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(2, 9))
def test_every_size_has_a_plan(ranks):
    check_sizes(ranks, every_size(ranks), random.Random(ranks))


def every_size(ranks: int) -> list[tuple[int, int]]:
    """Return (micro-batches, states ahead), up to 32 and 4 p."""
    return [(microbatches, ahead) for microbatches in range(1, 33) for ahead in range(1, 4 * ranks + 1)]


def check_sizes(ranks: int, sizes: list[tuple[int, int]], chance: random.Random) -> None:
    """Compare the search's time of a step with `longest_path`, and that of its order with other times."""
    for microbatches, ahead in sizes:
        work, other = ([RankWork(*random_times(chance)) for _ in range(ranks)] for _ in range(2))
        found = next(candidates(work, microbatches, ahead), None)
        assert found is not None, (microbatches, ahead, work)
        plan, found_ms = found
        held = [one.most_held for one in every_rank(plan)]
        held += [most_held_at_the_end(plan, rank) for rank in range(ranks)]
        assert max(held) <= max(ahead, LEAST_HELD)
        assert found_ms >= 0.999 * ideal_ms(work, microbatches)
        assert found_ms >= step_ms(plan, work) == pytest.approx(longest_path(plan, work), abs=1e-9)
        assert step_ms(plan, other) == pytest.approx(longest_path(plan, other), abs=1e-9)


def random_times(chance: random.Random) -> list[float]:
    return [chance.uniform(0.2, 4) for _ in range(3)]


def longest_path(plan: PrefetchPlan, work: list[RankWork]) -> float:
    """Return the time of a step: every task begins when the last of what it needs has ended."""
    ranks, microbatches = len(work), plan.num_microbatches
    gaps = [iter(one.gaps) for one in every_rank(plan)]
    lists = [stops(rank, ranks, microbatches) for rank in range(ranks)]
    in_gap = [[next(gaps[rank]) if one.has_gap else 0 for one in lists[rank]] for rank in range(ranks)]
    place = {(rank, one.link, one.number): n for rank in range(ranks) for n, one in enumerate(lists[rank])}

    @cache
    def reached_ms(rank: int, n: int) -> float:
        """Return when a rank comes to stop n."""
        return 0.0 if n == 0 else left_ms(rank, n - 1)

    @cache
    def left_ms(rank: int, n: int) -> float:
        """Return when the task behind stop n has ended."""
        stop = lists[rank][n]
        ready_ms = reached_ms(rank, n) + in_gap[rank][n] * work[rank].teacher_ms
        if stop.link is not None:
            other = rank + 1 if stop.link == rank else rank - 1
            ready_ms = max(ready_ms, reached_ms(other, place[other, stop.link, stop.number]))
        return ready_ms + (work[rank].of(stop.task) if stop.task else 0.0)

    endings = [ending_of(plan, rank) for rank in range(ranks)]

    @cache
    def ended_ms(rank: int, n: int) -> float:
        """Return when a rank comes to task n of those after its last exchange."""
        if n == 0:
            return left_ms(rank, len(lists[rank]) - 1)
        own_ms, kind = ended_ms(rank, n - 1), endings[rank][n - 1]
        if kind == "T":
            return own_ms + work[rank].teacher_ms
        other, others = (rank + 1, "<") if kind == ">" else (rank - 1, ">")
        number = endings[rank][: n - 1].count(kind)  # the other one's of this number
        place = [n for n, one in enumerate(endings[other]) if one == others][number]
        return max(own_ms, ended_ms(other, place))

    return max(ended_ms(rank, len(endings[rank])) for rank in range(ranks))


def ending_of(plan: PrefetchPlan, rank: int) -> str:
    one, microbatches = RankGaps.from_plan(plan, rank), plan.num_microbatches
    is_last, made, arrived = rank == len(plan.orders) - 1, sum(one.gaps), sum(one.arrivals)
    inputs, coming = (one.inputs_kept + arrived - made, microbatches - arrived) if rank else (None, 0)
    outputs = 0 if is_last else made - sum(one.departures)
    return ending(inputs, outputs, microbatches - made, coming, plan.ahead, is_last)


def most_held_at_the_end(plan: PrefetchPlan, rank: int) -> int:
    """Return the most states that a rank holds after its last exchange."""
    one, is_last = RankGaps.from_plan(plan, rank), rank == len(plan.orders) - 1
    inputs = one.inputs_kept + sum(one.arrivals) - sum(one.gaps)
    kept = one.done - plan.num_microbatches if is_last else 0  # of `outputs`, the losses have taken
    outputs = most = sum(one.gaps) - sum(one.departures) + kept
    for kind in ending_of(plan, rank):
        inputs += {"T": -1, "<": 1, ">": 0}[kind] if rank else 0
        outputs += {"T": 1, "<": 0, ">": -1}[kind]
        most = max(most, inputs + outputs if rank else outputs)
    return most
