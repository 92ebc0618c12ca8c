"""Teacher forwards ahead of the student: which work every pipeline rank does in which order.

The teacher is a second pipeline on the ranks of the student's 1F1B schedule. A rank runs a teacher forward
(T) where it would wait for a forward (F) or a backward (B) of the student, which keep Megatron's order. A
plan is a list of T, F and B for each rank, the same in every step. It is made before the run.

When a step begins, rank r of p has done `start + stagger * (p - 1 - r)` teacher forwards of it, and has
received the inputs of `stagger` more. At its end it has done as many of the next step. With stagger 0 the
later ranks have nothing to do at the beginning of a step.

The lists are found by letting ranks choose as simulated time goes by (`choose_greedily`), with up to two
hundred policies. `prefetch_replay.py` replays what they chose as a run would do it: a plan that gets through
cannot wait for itself, however long anything takes.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from mkd.plan.bubble import rank_order

NEVER = float("inf")
GOOD_ENOUGH = 1.005
"""Proportion of the ideal time at which the search ends."""


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

    def done(self, rank: int, ranks: int) -> int:
        """Return those of one pipeline rank."""
        return self.start + self.stagger * (ranks - 1 - rank)


@dataclass(frozen=True)
class PrefetchPlan:
    """The order of work in a step, on every pipeline rank."""

    boundary: Boundary
    num_microbatches: int
    orders: tuple[str, ...]  # of each rank: T, F and B

    @property
    def held(self) -> list[int]:
        """Final teacher states that the last rank holds, before and after each task. Each loss takes one."""
        changes = ({"T": 1, "F": -1, "B": 0}[kind] for kind in self.orders[-1])
        return list(accumulate(changes, initial=self.boundary.start))


@dataclass(frozen=True)
class Policy:
    """When a rank prefers a teacher forward to waiting, or to the student."""

    boundary: Boundary
    in_gaps: int  # teacher forwards of a step that gaps have room for; others take turns with the student's
    patience: float  # proportion of a teacher forward that must fit before the student's next task
    # A rank that fills the pipeline waits until its forward is received, as in a run. Without it some plans
    # are faster, and some cannot run.
    sends_wait: bool


def student_order(rank: int, ranks: int, num_microbatches: int) -> str:
    """Return the F and B of a rank in 1F1B."""
    return "".join("F" if task.is_forward else "B" for task in rank_order(rank, ranks, 1, num_microbatches))


def ideal_ms(work: Sequence[RankWork], num_microbatches: int) -> float:
    """Return the time of a step in which the slowest rank never waits."""
    return num_microbatches * max(one.total_ms for one in work)


def policies(work: Sequence[RankWork], num_microbatches: int, ahead: int) -> Iterator[Policy]:
    """Yield the policies that are tried, for teachers at most `ahead` micro-batches ahead of the loss."""
    ranks, most = len(work), min(ahead, num_microbatches)
    slowest = max(work, key=lambda one: one.total_ms)
    gaps = round((ranks - 1) * (slowest.forward_ms + slowest.backward_ms) / max(slowest.teacher_ms, 1e-9))
    room = sorted({min(num_microbatches, max(0, gaps + more)) for more in (-2, -1, 0)} | {0}, reverse=True)
    for stagger in (1, 2, 0):
        for start in range(0, min(most, ranks) + 1, max(1, ranks // 4)):
            boundary = Boundary(start, stagger)
            if boundary.done(0, ranks) <= most:
                for in_gaps, patience, sends_wait in product(room, (0.0, 0.5), (True, False)):
                    yield Policy(boundary, in_gaps, patience, sends_wait)


def candidates(
    work: Sequence[RankWork],  # of each pipeline rank
    num_microbatches: int,
    ahead: int,  # final states that the last rank may hold, 1 or more
) -> Iterator[tuple[float, PrefetchPlan]]:
    """Yield (simulated milliseconds, plan) until one is good enough.

    On each rank the order of F and B is that of 1F1B, and there are as many T as micro-batches.
    """
    for policy in policies(work, num_microbatches, ahead):
        step_ms, orders = choose_greedily(work, num_microbatches, ahead, policy)
        plan = PrefetchPlan(policy.boundary, num_microbatches, orders)
        if step_ms < NEVER and max(plan.held) <= ahead:
            yield step_ms, plan
            if step_ms <= GOOD_ENOUGH * ideal_ms(work, num_microbatches):
                return


def choose_greedily(
    work: Sequence[RankWork], num_microbatches: int, ahead: int, policy: Policy
) -> tuple[float, tuple[str, ...]]:
    """Return the time of a step and the order of work on each rank, as the ranks choose it.

    Messages take no time. The time is `NEVER` if the ranks wait for each other.
    """
    simulated = _Step(work, num_microbatches, ahead, policy)
    simulated.run()
    orders = tuple(map("".join, simulated.chosen))
    is_whole = all(len(order) == 3 * num_microbatches for order in orders)
    return (max(simulated.clock_ms) if is_whole else NEVER), orders


class _Step:
    """A step in which each rank decides what to do next whenever it is free."""

    def __init__(self, work: Sequence[RankWork], num_microbatches: int, ahead: int, policy: Policy):
        self.work, self.num_microbatches, self.ahead, self.policy = work, num_microbatches, ahead, policy
        ranks = range(len(work))
        self.student = [student_order(rank, len(work), num_microbatches) for rank in ranks]
        self.chosen: list[list[str]] = [[] for _ in ranks]
        self.counts = [{"T": 0, "F": 0, "B": 0} for _ in ranks]
        self.clock_ms = [0.0] * len(work)
        self.done_ms: dict[tuple[str, int, int], float] = {}  # by (kind, rank, number on that rank)
        # Ranks that wait until the rank behind receives this forward, and when ranks began to receive one.
        self.sending: dict[int, int] = {}
        self.receiving_ms = {(rank, 0): 0.0 for rank in ranks}
        self.losses_ms: list[float] = []  # ends of the last rank's forwards

    def run(self) -> None:
        """Let the ranks choose until no one can go on."""
        events = [(0.0, rank) for rank in range(len(self.work))]
        last = len(self.work) - 1
        while events:
            now, rank = heapq.heappop(events)
            if self.clock_ms[rank] > now:
                continue
            if rank in self.sending:
                received_ms = self.receiving_ms.get((rank + 1, self.sending[rank]), NEVER)
                if received_ms > now:
                    if received_ms < NEVER:
                        heapq.heappush(events, (received_ms, rank))
                    continue
                del self.sending[rank]
                self._receive(rank, now)
                heapq.heappush(events, (now, max(0, rank - 1)))
            kind, again = self._choose(rank, now)
            if kind is None:
                if again < NEVER:
                    heapq.heappush(events, (again, rank))
                continue
            end = self._do(kind, rank, now)
            is_loss = kind == "F" and rank == last
            concerned = range(last + 1) if is_loss else range(max(0, rank - 1), min(last, rank + 1) + 1)
            for other in concerned:
                heapq.heappush(events, (end, other))

    def _do(self, kind: str, rank: int, now: float) -> float:
        """Let a rank begin with a task, and return when it ends."""
        number, last = self.counts[rank][kind], len(self.work) - 1
        end = now + self.work[rank].of(kind)
        self.clock_ms[rank] = self.done_ms[kind, rank, number] = end
        self.counts[rank][kind] += 1
        self.chosen[rank].append(kind)
        if kind == "F" and rank == last:
            self.losses_ms.append(end)
        if kind == "F" and number < last - rank and self.policy.sends_wait:
            self.sending[rank] = number
        elif kind != "T":
            self._receive(rank, end)
        return end

    def _receive(self, rank: int, at_ms: float) -> None:
        """Note when a rank begins to receive the forward that it runs next."""
        if self._following(rank) == "F":
            self.receiving_ms[rank, self.counts[rank]["F"]] = at_ms

    def _following(self, rank: int) -> str | None:
        """Return the next task of the student."""
        position = self.counts[rank]["F"] + self.counts[rank]["B"]
        return self.student[rank][position] if position < len(self.student[rank]) else None

    def _choose(self, rank: int, now: float) -> tuple[str | None, float]:
        """Return what a free rank does now; else None, and when to ask again."""
        own, following = self.counts[rank], self._following(rank)
        student_ms = self._ready_ms(following, rank) if following else NEVER
        teacher_ms = self._teacher_ready_ms(rank, now)
        fits = student_ms >= now + self.policy.patience * self.work[rank].teacher_ms
        turns = 1 - self.policy.in_gaps / self.num_microbatches
        is_due = following == "F" and own["T"] < turns * own["F"]
        if teacher_ms <= now and (is_due or (student_ms > now and fits)):
            return "T", now
        if student_ms <= now:
            return following, now
        return None, min((time for time in (student_ms, teacher_ms) if time > now), default=NEVER)

    def _teacher_ready_ms(self, rank: int, now: float) -> float:
        number = self.counts[rank]["T"]
        done = self.policy.boundary.done(rank, len(self.work)) + number
        if number == self.num_microbatches or done - bisect_right(self.losses_ms, now) >= self.ahead:
            return NEVER
        return self._ready_ms("T", rank)

    def _ready_ms(self, kind: str, rank: int) -> float:
        """Return when the inputs of a rank's next task of that kind are there, `NEVER` if that is unknown."""
        number = self.counts[rank][kind]
        return max((self.done_ms.get(one, NEVER) for one in self._inputs(kind, rank, number)), default=0.0)

    def _inputs(self, kind: str, rank: int, number: int) -> Iterator[tuple[str, int, int]]:
        last, boundary = len(self.work) - 1, self.policy.boundary
        if kind == "T" and rank and number >= boundary.stagger:
            yield "T", rank - 1, number - boundary.stagger
        if kind == "F" and rank:
            yield "F", rank - 1, number
        if kind == "F" and rank == last and number >= boundary.start:
            yield "T", rank, number - boundary.start
        if kind == "B":
            yield ("F", rank, number) if rank == last else ("B", rank + 1, number)
