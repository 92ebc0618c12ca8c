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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate, pairwise, product

from mkd.plan.times.bubble import rank_order

NEVER = float("inf")
DONE = "."  # behind the student's tasks of a rank
COMMUNICATORS = 2
"""Communicators of the states that go from rank to rank. They take turns, state by state."""
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
    # A rank that fills the pipeline waits until its forward is received, and a teacher forward until its
    # state can be sent, as in a run. Without it some plans are faster, and some cannot run.
    sends_wait: bool


@lru_cache(maxsize=256)  # every policy asks for the same
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
    orders = tuple("".join(state.chosen) for state in simulated.ranks)
    is_whole = all(len(order) == 3 * num_microbatches for order in orders)
    return (max(state.clock_ms for state in simulated.ranks) if is_whole else NEVER), orders


class _RankState:
    """The work of one rank, done and next. Lists hold the ends of its tasks, by their number on the rank."""

    __slots__ = (
        "backward_inputs",
        "backwards",
        "chosen",
        "clock_ms",
        "computes_loss",
        "done",
        "forward_inputs",
        "forwards",
        "order",
        "position",
        "receiving_ms",
        "sending",
        "teacher_inputs",
        "teacher_outputs",
        "teachers",
        "work",
    )

    def __init__(self, rank: int, work: Sequence[RankWork], num_microbatches: int, boundary: Boundary):
        ranks = len(work)
        self.work, self.computes_loss = work[rank], rank == ranks - 1
        self.done = boundary.done(rank, ranks)  # teacher forwards before the step
        self.order, self.position = student_order(rank, ranks, num_microbatches) + DONE, 0
        self.teachers: list[float] = []
        self.forwards: list[float] = []
        self.backwards: list[float] = []
        self.chosen: list[str] = []
        self.clock_ms = 0.0
        # The forward that the rank behind has yet to receive, or None.
        self.sending: int | None = None
        self.receiving_ms = [0.0]  # when this rank began to receive each forward
        # Tasks of other ranks that its own wait for; None: nothing.
        self.teacher_inputs: list[float] | None = None
        self.teacher_outputs: list[float] | None = None  # teacher forwards of the rank behind
        self.forward_inputs: list[float] | None = None
        self.backward_inputs = self.forwards  # of the last rank


class _Step:
    """A step in which each rank decides what to do next whenever it is free."""

    def __init__(self, work: Sequence[RankWork], num_microbatches: int, ahead: int, policy: Policy):
        self.num_microbatches, self.ahead, self.policy = num_microbatches, ahead, policy
        self.turns = 1 - policy.in_gaps / num_microbatches
        sizes = num_microbatches, policy.boundary
        self.ranks = [_RankState(rank, work, *sizes) for rank in range(len(work))]
        for before, after in pairwise(self.ranks):
            after.teacher_inputs, after.forward_inputs = before.teachers, before.forwards
            before.backward_inputs, before.teacher_outputs = after.backwards, after.teachers
        self.losses_ms = self.ranks[-1].forwards
        self.events = [(0.0, rank) for rank in range(len(work))]

    def run(self) -> None:
        """Let the ranks choose until none can continue. A busy rank asks when it is free."""
        ranks, events, last = self.ranks, self.events, len(self.ranks) - 1
        while events:
            now, rank = heappop(events)
            state = ranks[rank]
            if state.clock_ms > now or (state.sending is not None and not self._has_sent(rank, now)):
                continue
            kind, again = self._choose(state, now)
            if kind is None:
                if again < NEVER:
                    heappush(events, (again, rank))
                continue
            end = self._do(kind, rank, now)
            heappush(events, (end, rank))
            receiver = rank - 1 if kind == "B" else rank + 1
            if 0 <= receiver <= last and ranks[receiver].clock_ms <= now:
                heappush(events, (end, receiver))
            if rank and ranks[rank - 1].sending is not None:
                heappush(events, (end, rank - 1))
            if rank and kind == "T":  # it has received a state
                heappush(events, (now, rank - 1))
            if kind == "F" and rank == last:
                loss = len(self.losses_ms) - 1
                for other, waiting in enumerate(ranks):
                    if waiting.done + len(waiting.teachers) - self.ahead == loss:
                        heappush(events, (end, other))

    def _has_sent(self, rank: int, now: float) -> bool:
        """Return True if the rank behind has received what this rank sends."""
        state, received_ms = self.ranks[rank], self.ranks[rank + 1].receiving_ms
        assert state.sending is not None
        at_ms = received_ms[state.sending] if state.sending < len(received_ms) else NEVER
        if at_ms > now:
            if at_ms < NEVER:
                heappush(self.events, (at_ms, rank))
            return False
        state.sending = None
        self._receive(state, now)
        heappush(self.events, (now, max(0, rank - 1)))
        return True

    def _do(self, kind: str, rank: int, now: float) -> float:
        """Let a rank begin with a task, and return when it ends."""
        state = self.ranks[rank]
        state.chosen.append(kind)
        if kind == "T":
            state.clock_ms = now + state.work.teacher_ms
            state.teachers.append(state.clock_ms)
            return state.clock_ms
        state.position += 1
        if kind == "F":
            state.clock_ms = now + state.work.forward_ms
            state.forwards.append(state.clock_ms)
        else:
            state.clock_ms = now + state.work.backward_ms
            state.backwards.append(state.clock_ms)
        number = len(state.forwards) - 1
        if kind == "F" and number < len(self.ranks) - 1 - rank and self.policy.sends_wait:
            state.sending = number
        else:
            self._receive(state, state.clock_ms)
        return state.clock_ms

    def _receive(self, state: _RankState, at_ms: float) -> None:
        """Note when a rank begins to receive the forward that it runs next."""
        if state.order[state.position] == "F":
            state.receiving_ms.append(at_ms)

    def _choose(self, state: _RankState, now: float) -> tuple[str | None, float]:
        """Return what a free rank does now; else None, and when to ask again."""
        following, number = state.order[state.position], len(state.teachers)
        student_ms = self._student_ms(state, following)
        teacher_ms = NEVER if number == self.num_microbatches else self._teacher_ms(state, number)
        if teacher_ms <= now:
            is_due = following == "F" and number < self.turns * len(state.forwards)
            fits = student_ms >= now + self.policy.patience * state.work.teacher_ms
            if is_due or (student_ms > now and fits):
                return "T", now
        if student_ms <= now:
            return following, now
        return None, teacher_ms if now < teacher_ms < student_ms else student_ms

    def _teacher_ms(self, state: _RankState, number: int) -> float:
        """Return when a rank's next teacher forward can begin, `NEVER` if that is unknown."""
        ready_ms, needed, loss = 0.0, number - self.policy.boundary.stagger, state.done + number - self.ahead
        if state.teacher_outputs is not None and number >= COMMUNICATORS and self.policy.sends_wait:
            received = number - COMMUNICATORS + 1 + self.policy.boundary.stagger
            if len(state.teacher_outputs) < min(received, self.num_microbatches):
                return NEVER
        if state.teacher_inputs is not None and needed >= 0:
            if needed >= len(state.teacher_inputs):
                return NEVER
            ready_ms = state.teacher_inputs[needed]
        if loss < 0:
            return ready_ms
        return max(ready_ms, self.losses_ms[loss]) if loss < len(self.losses_ms) else NEVER

    def _student_ms(self, state: _RankState, following: str) -> float:
        """Return when the inputs of the student's next task are there, `NEVER` if that is unknown."""
        if following == "B":
            inputs, number = state.backward_inputs, len(state.backwards)
            return inputs[number] if number < len(inputs) else NEVER
        number, ready_ms = len(state.forwards), 0.0
        if following == DONE:
            return NEVER
        if state.forward_inputs is not None:
            if number >= len(state.forward_inputs):
                return NEVER
            ready_ms = state.forward_inputs[number]
        needed = number - self.policy.boundary.start
        if state.computes_loss and needed >= 0:
            return max(ready_ms, state.teachers[needed]) if needed < len(state.teachers) else NEVER
        return ready_ms
