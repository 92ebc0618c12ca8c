"""Check the replay of teacher forwards against steps counted by hand, and that it refuses wrong orders."""

from __future__ import annotations

import pytest

from mkd.errors import UsageError
from mkd.plan.times.prefetch import Boundary, PrefetchPlan, RankWork
from mkd.plan.times.prefetch_replay import RankGaps, replay
from tests.reported import Reported

WORK = [RankWork(teacher_ms=3.0, forward_ms=1.0, backward_ms=2.0)] * 2


def plan_of(*orders: str, start: int = 0, stagger: int = 0) -> PrefetchPlan:
    return PrefetchPlan(Boundary(start, stagger), orders[0].count("F"), orders)


@pytest.mark.parametrize(
    ("plan", "step_ms"),
    [
        # Rank 1 waits 3 ms for its first teacher forward, rank 0 at the end for the last backward.
        (plan_of("TFTFBB", "TFBTFB"), 17.0),
        # Rank 0 is one forward ahead, and fills its wait for the last backward with one of the next step.
        (plan_of("FTFBTB", "TFBTFB", stagger=1), 14.0),
        # Rank 0 does it after its last backward, which ends at 14.
        (plan_of("FTFBBT", "TFBTFB", stagger=1), 17.0),
        # Both are ahead: the first loss comes at once, and at 11 rank 1 begins with the next step.
        (plan_of("FFTBTB", "FBTFBT", start=1), 14.0),
    ],
)
def test_steps_counted_by_hand(plan, step_ms):
    assert replay(plan, WORK) == step_ms


def test_a_send_waits_for_its_receiver():
    """Rank 1 receives rank 0's second forward after a teacher forward, which waits for rank 0's.

    If rank 0 does that before its second forward, all is well.
    """
    later = ("TFFBFTBBT", "FBTFBTFBT")
    work = [RankWork(3.0, 1.0, 2.0)] * 3
    assert replay(plan_of("FTFTFBBBT", *later, start=1), work) > 0
    with pytest.raises(UsageError) as caught:
        replay(plan_of("FFTFTBBBT", *later, start=1), work)
    assert Reported.of(caught.value) == "teacher-prefetch-not-possible: the plan of teacher forwards ahead"


@pytest.mark.parametrize(
    "orders",
    [
        ("FFBBTT", "TFBTFB"),  # the loss waits for the teacher, which waits for the loss's gradient
        ("TFTFBB", "FBTTFB"),  # the loss of the first micro-batch comes before its teacher
        ("TFBTFB", "TFBTFB"),  # not the order of 1F1B
        ("TFFBB", "TFBTFB"),  # a forward of the teacher is missing
        ("TFTFBB", "TFTBFB"),  # work between the loss and its backward, where a run has no gap
    ],
)
def test_a_wrong_order_is_refused(orders):
    with pytest.raises(UsageError) as caught:
        replay(plan_of(*orders), WORK)
    assert Reported.of(caught.value) == "teacher-prefetch-not-possible: the plan of teacher forwards ahead"


def test_a_state_waits_for_its_communicator():
    """Two take turns: rank 0's last state waits for the second, received after rank 1's first backward.

    That needs a forward of rank 0. With a hardware queue for each stream rank 0 would come to it. Where
    streams share one, the state stands before it.
    """
    with pytest.raises(UsageError) as caught:
        replay(plan_of("TTTTFFBFBFBB", "TFBTFBTFBTFB"), WORK)
    assert "rank 0: ('wait', ('state', 0, 1))" in caught.value.why
    assert replay(plan_of("TTTFTFBFBFBB", "TFBTFBTFBTFB"), WORK) > 0


def test_the_gaps_of_a_rank():
    plan = plan_of("FTFBTB", "TFBTFB", stagger=1)
    assert RankGaps.from_plan(plan, 0) == RankGaps(1, 0, (0, 1, 0, 1), after=0, at_waits=(0, 1, 0, 1))
    assert RankGaps.from_plan(plan, 1) == RankGaps(0, 1, (1, 0, 1, 0), after=0, at_waits=(1, 1))
