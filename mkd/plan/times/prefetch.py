"""Teacher forwards ahead of the student: which work every pipeline rank does in which order.

The teacher is a second pipeline on the ranks of the student's 1F1B schedule. A rank runs a teacher forward
(T) where it would wait for a forward (F) or a backward (B) of the student, which keep Megatron's order. A
plan is a list of T, F and B for each rank, the same in every step. It is made before the run, by
`prefetch_search.py`.

Two neighbours talk in the student's exchanges alone. Exchange n of a link takes the student's forward n down
and its backward n - w up, where w is the number of forwards that fill the pipeline behind the upper rank.
With it go all states that the upper rank has made since the one before. So a plan cannot wait for itself,
wherever a rank waits and however long: 1F1B never does, even if every message waits for its receiver, and
between two exchanges a rank needs nobody.

When a step begins, rank r of p has done `start + stagger * (p - 1 - r)` teacher forwards of it, at most all,
and has the inputs of those that rank r - 1 has done. At its end it has done as many of the next step: after
the last exchange each rank runs what remains, and hands states on one at a time (`ending`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from mkd.errors import UsageError

LEAST_HELD = 2
"""States that a rank holds in any case: one that it has made, and the next, which comes before that goes."""


@dataclass(frozen=True)
class RankWork:
    """Milliseconds of one micro-batch on a pipeline rank."""

    teacher_ms: float  # forward of the teachers
    forward_ms: float  # of the student; on the last rank with heads and loss
    backward_ms: float

    def of(self, kind: str) -> float:
        """Return the time of T, F or B."""
        return {"T": self.teacher_ms, "F": self.forward_ms, "B": self.backward_ms}[kind]

    @property
    def total_ms(self) -> float:
        """Time of all three."""
        return self.teacher_ms + self.forward_ms + self.backward_ms


@dataclass(frozen=True)
class Boundary:
    """Teacher forwards of a step that are done when it begins."""

    start: int  # on the last rank
    stagger: int  # more on every rank before

    def done(self, rank: int, ranks: int, num_microbatches: int) -> int:
        """Return those of one pipeline rank."""
        return min(num_microbatches, self.start + self.stagger * (ranks - 1 - rank))


@dataclass(frozen=True)
class Stop:
    """A place in the student's work where a rank talks to a neighbour, in the order of Megatron's 1F1B.

    Teacher forwards run between posting the exchange and waiting for it, in front of `task`.
    """

    link: int | None  # the upper rank of the exchange; None: there is none here
    number: int  # of the exchange on its link
    task: str  # F or B, which comes next; "": another stop
    has_gap: bool  # False: nothing is received that the rank would work on


@lru_cache(maxsize=256)  # every policy asks for the same
def stops(rank: int, ranks: int, num_microbatches: int) -> tuple[Stop, ...]:
    """Return the stops of a step on one rank."""
    is_first, is_last = rank == 0, rank == ranks - 1
    fills, fills_before = min(ranks - 1 - rank, num_microbatches), min(ranks - rank, num_microbatches)

    def up(number: int, task: str) -> Stop:  # with the rank before
        return Stop(None if is_first else rank - 1, number, task, task != "")

    def down(number: int, task: str) -> Stop:  # with the rank behind
        return Stop(None if is_last else rank, number, task, task != "" and not is_last)

    found = []  # without a gap on the last rank: a loss and its backward are one call of Megatron
    for number in range(fills):
        found += [up(number, "F"), down(number, "")]
    if fills < num_microbatches:
        found.append(up(fills, "F"))
    for backward in range(num_microbatches - fills):
        follows = "F" if fills + backward + 1 < num_microbatches else ""
        found += [down(fills + backward, "B"), up(fills_before + backward, follows)]
    for backward in range(num_microbatches - fills, num_microbatches):
        found += [down(fills + backward, "B"), up(fills_before + backward, "")]
    return tuple(found)


def student_order(rank: int, ranks: int, num_microbatches: int) -> str:
    """Return the F and B of a rank in 1F1B."""
    return "".join(stop.task for stop in stops(rank, ranks, num_microbatches))


@dataclass(frozen=True)
class PrefetchPlan:
    """The order of work in a step, on every pipeline rank."""

    boundary: Boundary
    num_microbatches: int
    orders: tuple[str, ...]  # of each rank: T, F and B
    ahead: int  # states that a rank may hold

    def done(self, rank: int) -> int:
        """Return the teacher forwards of a step that a rank has done when it begins."""
        return self.boundary.done(rank, len(self.orders), self.num_microbatches)

    @property
    def held(self) -> list[int]:
        """Final teacher states that the last rank holds, before and after each task. Each loss takes one."""
        changes = ({"T": 1, "F": -1, "B": 0}[kind] for kind in self.orders[-1])
        return list(accumulate(changes, initial=self.done(len(self.orders) - 1)))


@dataclass(frozen=True)
class RankGaps:
    """Teacher forwards of one rank in a step, and the states that come and go."""

    done: int  # teacher forwards of the step that are done when it begins
    inputs_kept: int  # further ones whose inputs have been received then
    gaps: tuple[int, ...]  # teacher forwards in each gap
    arrivals: tuple[int, ...]  # states that come with each exchange with the rank before
    departures: tuple[int, ...]  # and that go with each one with the rank behind
    most_held: int  # inputs and outputs at a time, also while they are under way
    ahead: int  # that it may hold

    @classmethod
    def from_plan(cls, plan: PrefetchPlan, rank: int) -> RankGaps:
        """Return the work of one rank. Raises UsageError for a list that a run could not follow."""
        gaps, departures = _walked(plan, rank)
        arrivals = _walked(plan, rank - 1)[1] if rank else ()
        kept = plan.done(rank - 1) - plan.done(rank) if rank else 0
        most = _followed(plan, rank, kept, arrivals)
        return cls(plan.done(rank), kept, gaps, arrivals, departures, most, plan.ahead)


def _walked(plan: PrefetchPlan, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the teacher forwards in each gap, and the states that go with each exchange."""
    order, ranks = plan.orders[rank], len(plan.orders)
    expected = student_order(rank, ranks, plan.num_microbatches)
    if order.replace("T", "") != expected or order.count("T") != plan.num_microbatches:
        raise refused(f"rank {rank} has {order}, not {expected} with {plan.num_microbatches} T")
    gaps, departures, made, sent = [], [], 0, 0
    waiting = iter(order)
    for stop in stops(rank, ranks, plan.num_microbatches):
        if stop.link == rank:
            departures.append(made - sent)
            sent = made
        if stop.task:
            in_gap = 0
            while next(waiting) == "T":
                in_gap += 1
            if stop.has_gap:
                gaps.append(in_gap)
            elif in_gap:
                raise refused(f"rank {rank} computes the loss, and its backward follows at once: {order}")
            made += in_gap
    return tuple(gaps), tuple(departures)


def _followed(plan: PrefetchPlan, rank: int, kept: int, arrivals: Sequence[int]) -> int:
    """Return the most states that a rank holds. Raises UsageError if one is used before it is there.

    Behind the last exchange it holds no more; see `ending`.
    """
    order, is_last = plan.orders[rank], rank == len(plan.orders) - 1
    inputs, outputs = kept, plan.done(rank) if is_last else 0
    coming, remaining, most = iter(arrivals), iter(order), 0
    for stop in stops(rank, len(plan.orders), plan.num_microbatches):
        departing, outputs = (outputs, 0) if stop.link == rank else (0, outputs)
        arriving = next(coming) if stop.link == rank - 1 else 0
        while stop.task and next(remaining) == "T":
            if rank and not inputs:
                raise refused(f"rank {rank} has no input for a teacher forward: {order}")
            inputs, outputs = inputs - (rank > 0), outputs + 1
        most = max(most, inputs + arriving + departing + outputs)
        inputs += arriving
        if is_last and stop.task == "F":
            if not outputs:
                raise refused(f"rank {rank} computes a loss before it has the teacher's state: {order}")
            outputs -= 1
    return most


def ending(
    inputs: int | None,  # that are there; None on the first rank, which needs none
    outputs: int,  # that are not sent
    remaining: int,  # teacher forwards
    coming: int,  # states that the rank before still sends
    ahead: int,  # states that the rank may hold
    is_last: bool,
) -> str:
    """Return the order of what a rank does after the last exchange of a step.

    T: a teacher forward, <: receive a state, >: send one. What needs no other rank comes first. Then each
    state is received, used and sent before the next one, so that a rank holds no more of them than before.

    All get through, even if each message waits for its receiver: a rank that waits for the one before is
    served once that one waits for it; and of ranks that wait for the next one, the last rank is none.
    """
    at_once = min(max(0, ahead - outputs) if inputs is None else inputs, remaining)
    later, send = remaining - at_once, "" if is_last else ">"
    taken = min(later, coming)
    first = "T" * at_once + send * (outputs + at_once)
    return first + ("<T" + send) * taken + ("T" + send) * (later - taken) + "<" * (coming - taken)


def ideal_ms(work: Sequence[RankWork], num_microbatches: int) -> float:
    """Return the time of a step in which the slowest rank never waits."""
    return num_microbatches * max(one.total_ms for one in work)


def every_rank(plan: PrefetchPlan) -> Iterator[RankGaps]:
    """Yield what each rank does. Raises UsageError for a plan that a run could not follow."""
    for rank in range(len(plan.orders)):
        yield RankGaps.from_plan(plan, rank)


def refused(why: str) -> UsageError:
    """Return the error of a plan that a run cannot follow."""
    what, do = "the plan of teacher forwards ahead cannot run", "use another --teacher-prefetch, or 0"
    return UsageError(what, why, do, code="teacher-prefetch-not-possible")
