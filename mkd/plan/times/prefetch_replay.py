"""Replay a plan of teacher forwards with every message that a run would send.

Each rank runs its tasks in order. Messages of the student are those of Megatron's 1F1B: a rank posts them
together where a task ends, does the teacher forwards of the gap, and then waits for them. A send ends only
when its receiver has posted the receive, as with NCCL for large messages.

States of the teacher go over communicators of their own, which take turns state by state. One handles the
messages of a rank one after another, so that a state waits until the one before on its communicator has
arrived. On a GPU much else may wait with it: streams share a few hardware queues
(CUDA_DEVICE_MAX_CONNECTIONS), in which a transfer that cannot start holds up all that was queued after it. A
replay has a single queue, so that a plan gets through with any number of them.

A replay has three steps: the first fills the teacher's pipeline, the last runs nothing ahead. Between steps
all ranks wait for each other, and no message is under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mkd.errors import UsageError
from mkd.plan.times.prefetch import COMMUNICATORS, PrefetchPlan, RankWork, candidates, student_order

STEPS = 3
REPLAYED = 8
"""Plans of a search that get through a replay: the fastest of them is kept."""


# Plain tuples, of which a long step has hundreds of thousands.
Message = tuple[str, int, int]
"""A tensor between neighbours: state (of the teacher), forward or backward; lower rank; micro-batch."""
Action = tuple[Any, ...]
"""A step of a rank's program: a name below, and what belongs to it."""

POST = "post"  # message: announces one side, without waiting
WAIT = "wait"  # message: until it has arrived
WORK = "work"  # T, F or B: computes
MEET = "meet"  # waits for all ranks, at the end of a step


@dataclass(frozen=True)
class RankGaps:
    """The teacher forwards of one rank in a step, by the gaps between its tasks of the student."""

    done: int  # teacher forwards of the step that are done when it begins
    inputs_kept: int  # further ones whose inputs have been received then
    before: tuple[int, ...]  # teacher forwards before each task of the student
    after: int  # and after the last one
    at_waits: tuple[int, ...]  # those of `before`, without backwards of the last rank: nothing is received

    @classmethod
    def from_plan(cls, plan: PrefetchPlan, rank: int) -> RankGaps:
        """Return the gaps of one rank. Raises UsageError for a list that a run could not follow."""
        order, ranks = plan.orders[rank], len(plan.orders)
        expected = student_order(rank, ranks, plan.num_microbatches)
        if order.replace("T", "") != expected or order.count("T") != plan.num_microbatches:
            raise _refused(f"rank {rank} has {order}, not {expected} with {plan.num_microbatches} T")
        if rank == ranks - 1 and "FT" in order:
            raise _refused(f"rank {rank} computes the loss, and its backward has to follow at once: {order}")
        if rank == ranks - 1 and min(plan.held) < 0:
            raise _refused(f"rank {rank} computes a loss before it has the teacher's state: {order}")
        before, waiting = [], 0
        for kind in order:
            if kind == "T":
                waiting += 1
            else:
                before.append(waiting)
                waiting = 0
        stagger = plan.boundary.stagger if rank else 0
        waits = [gap for gap, kind in zip(before, expected, strict=True) if kind == "F" or rank < ranks - 1]
        return cls(plan.boundary.done(rank, ranks), stagger, tuple(before), waiting, tuple(waits))


@lru_cache(maxsize=64)  # places of a teacher's weights often have the same times
def plan_prefetch(
    work: tuple[RankWork, ...],  # of each pipeline rank
    num_microbatches: int,
    ahead: int,  # teacher states that the last rank may hold
) -> tuple[PrefetchPlan, float]:
    """Return the fastest plan found and the milliseconds of a step. UsageError if none gets through."""
    found = {plan: step_ms for step_ms, plan in candidates(work, num_microbatches, ahead)}
    timed: dict[PrefetchPlan, float] = {}
    for plan in sorted(found, key=lambda plan: found[plan]):
        if len(timed) < REPLAYED:
            # Some policies let sends go at once, so that a few of their plans cannot run.
            with suppress(UsageError):
                timed[plan] = replay(plan, work)
    if not timed:
        raise _refused("no order of the teacher's forwards was found")
    chosen = min(timed, key=lambda plan: timed[plan])
    return chosen, timed[chosen]


def replay(plan: PrefetchPlan, work: Sequence[RankWork]) -> float:
    """Return the milliseconds of a step between others. Raises UsageError if ranks wait for each other."""
    programs = [_Rank(plan, rank).program() for rank in range(len(plan.orders))]
    ends_ms = _Replay(programs, work).run()
    return ends_ms[1] - ends_ms[0]


class _Rank:
    """Writes down what one rank does in all steps of a replay."""

    def __init__(self, plan: PrefetchPlan, rank: int):
        self.rank = rank
        self.is_first, self.is_last = rank == 0, rank == len(plan.orders) - 1
        self.gaps = RankGaps.from_plan(plan, rank)
        self.num_microbatches, self.total = plan.num_microbatches, STEPS * plan.num_microbatches
        self.warmup = min(len(plan.orders) - 1 - rank, plan.num_microbatches)
        self.actions: list[Action] = []
        # Forwards of the teacher so far, inputs received, and outputs known to have arrived.
        self.teachers = self.received = self.sent = 0

    def program(self) -> list[Action]:
        """Return all actions, in order."""
        self._teach(self.gaps.done)
        self._receive_states(self.gaps.done + self.gaps.inputs_kept)
        self._await_sends(self.teachers)
        for step in range(STEPS):
            self._step(step * self.num_microbatches)
        return self.actions

    def _step(self, first: int) -> None:
        """Write down 1F1B of the micro-batches from `first` on, with the gaps filled."""
        before = iter(self.gaps.before)
        steady = range(first + self.warmup, first + self.num_microbatches)
        for number in range(first, first + self.warmup):
            self._exchange(self._forward_in(number), gap=next(before))
            self.actions.append((WORK, "F"))
            self._exchange(self._forward_out(number))
        if steady:
            self._exchange(self._forward_in(steady.start), gap=next(before))
        for backward, number in enumerate(steady, first):
            self.actions.append((WORK, "F"))
            self._exchange([*self._forward_out(number), *self._backward_in(backward)], gap=next(before))
            self.actions.append((WORK, "B"))
            if number == steady[-1]:
                self._exchange(self._backward_out(backward))
            else:
                self._exchange(
                    [*self._backward_out(backward), *self._forward_in(number + 1)], gap=next(before)
                )
        for backward in range(first + len(steady), first + self.num_microbatches):
            self._exchange(self._backward_in(backward), gap=next(before))
            self.actions.append((WORK, "B"))
            self._exchange(self._backward_out(backward))
        self._teach(self.gaps.after)
        self._receive_states(self.teachers + self.gaps.inputs_kept)
        self._await_sends(self.teachers)
        self.actions.append((MEET,))

    def _await_sends(self, before: int) -> None:
        """Wait until the states with numbers below `before` that were sent are received."""
        unsent = range(self.sent, 0 if self.is_last else min(before, self.teachers))
        self.actions += [(WAIT, self._state(self.rank, number)) for number in unsent]
        self.sent += len(unsent)

    def _exchange(self, posts: Sequence[Action], gap: int = 0) -> None:
        """Post messages of the student, run `gap` forwards of the teacher, then wait for the messages."""
        self.actions += posts
        self._teach(gap)
        self.actions += [(WAIT, message) for _, message in posts]

    def _teach(self, number: int) -> None:
        """Run forwards of the teacher, as many as there are micro-batches left."""
        for _ in range(min(number, self.total - self.teachers)):
            self._receive_states(self.teachers + 1)
            self.actions.append((WORK, "T"))
            if not self.is_last:
                self._post_state(self.rank, self.teachers)
            self.teachers += 1

    def _receive_states(self, until: int) -> None:
        """Receive inputs of the teacher until there have been so many."""
        while not self.is_first and self.received < min(until, self.total):
            self._post_state(self.rank - 1, self.received)
            self.actions.append((WAIT, self._state(self.rank - 1, self.received)))
            self.received += 1

    def _post_state(self, link: int, number: int) -> None:
        """Post one end of a state's message when the rank has sent the state before on its communicator."""
        self._await_sends(number - COMMUNICATORS + 1)
        self.actions.append((POST, self._state(link, number)))

    def _state(self, link: int, number: int) -> Message:
        return "state", link, number

    def _forward_in(self, number: int) -> list[Action]:
        return [] if self.is_first else [(POST, ("forward", self.rank - 1, number))]

    def _forward_out(self, number: int) -> list[Action]:
        return [] if self.is_last else [(POST, ("forward", self.rank, number))]

    def _backward_in(self, number: int) -> list[Action]:
        return [] if self.is_last else [(POST, ("backward", self.rank, number))]

    def _backward_out(self, number: int) -> list[Action]:
        return [] if self.is_first else [(POST, ("backward", self.rank - 1, number))]


class _Replay:
    """Runs the programs of all ranks, each as far as its messages let it."""

    def __init__(self, programs: Sequence[Sequence[Action]], work: Sequence[RankWork]):
        self.times_ms = [{kind: one.of(kind) for kind in "TFB"} for one in work]
        self.following = [iter(program) for program in programs]
        self.actions = [next(program, None) for program in self.following]  # None: all is done
        self.clock_ms = [0.0] * len(programs)
        self.posted_ms: dict[Message, float] = {}  # by the first side
        self.arrived_ms: dict[Message, float] = {}
        self.ends_ms: list[float] = []

    def run(self) -> list[float]:
        """Return when each step ends. Raises UsageError if ranks wait for each other."""
        ranks = range(len(self.actions))
        while any([self._advance(rank) for rank in ranks]):
            if all(action == (MEET,) for action in self.actions):
                self.ends_ms.append(max(self.clock_ms))
                self.clock_ms = [self.ends_ms[-1] for _ in ranks]
                self.actions = [next(program, None) for program in self.following]
        waiting = [f"rank {rank}: {action}" for rank, action in enumerate(self.actions) if action]
        if waiting:
            raise _refused(f"ranks wait for each other: {'; '.join(waiting)}")
        return self.ends_ms

    def _advance(self, rank: int) -> bool:
        """Run a rank until it has to wait. Return True if it did something."""
        times_ms, arrived_ms, following = self.times_ms[rank], self.arrived_ms, self.following[rank]
        action, clock_ms, has_moved = self.actions[rank], self.clock_ms[rank], False
        while action is not None:
            kind = action[0]
            if kind == WORK:
                clock_ms += times_ms[action[1]]
            elif kind == POST:
                self._post(action[1], clock_ms)
            elif kind == MEET or action[1] not in arrived_ms:
                break
            else:
                clock_ms = max(clock_ms, arrived_ms[action[1]])
            action, has_moved = next(following, None), True
        self.actions[rank], self.clock_ms[rank] = action, clock_ms
        return has_moved

    def _post(self, message: Message, at_ms: float) -> None:
        if message not in self.posted_ms:
            self.posted_ms[message] = at_ms
        else:  # by the other side
            self.arrived_ms[message] = max(at_ms, self.posted_ms[message])


def _refused(why: str) -> UsageError:
    what, do = "the plan of teacher forwards ahead cannot run", "use another --teacher-prefetch, or 0"
    return UsageError(what, why, do, code="teacher-prefetch-not-possible")
