"""Search an order of teacher forwards: ranks choose as simulated time goes by, with some hundred policies.

The simulation follows the messages of a run: an exchange is over when both ranks have posted it, and what it
carries is what the upper rank had made when it posted. Messages take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise, product

from mkd.plan.times.prefetch import (
    LEAST_HELD,
    Boundary,
    PrefetchPlan,
    RankWork,
    Stop,
    ending,
    every_rank,
    ideal_ms,
    refused,
    stops,
)

NEVER = float("inf")
GOOD_ENOUGH = 1.005
"""Proportion of the ideal time at which the search ends."""
STAGGERS = 2, 3, 1, 4
"""Teacher forwards that a rank is ahead of the next one, in the order in which they are tried."""
SMALL = 256
"""Ranks x micro-batches up to which more policies are tried, in the same time."""


@dataclass(frozen=True)
class Policy:
    """When a rank prefers a teacher forward to waiting, or to the student."""

    boundary: Boundary
    in_gaps: int  # teacher forwards of a step that gaps have room for; others take turns with the student's
    patience: float  # proportion of a teacher forward that must fit before the student's next task


@lru_cache(maxsize=64)  # places of a teacher's weights often have the same times
def plan_prefetch(
    work: tuple[RankWork, ...],  # of each pipeline rank
    num_microbatches: int,
    ahead: int,  # states that a rank may hold; LEAST_HELD at least
) -> tuple[PrefetchPlan, float]:
    """Return the fastest plan found and the milliseconds of a step. UsageError if there is none."""
    found = candidates(work, num_microbatches, ahead)
    best, _ = min(found, key=lambda one: one[1], default=(None, NEVER))
    if best is None:
        raise refused("no order of the teacher's forwards was found")
    return best, step_ms(best, work)


def candidates(
    work: Sequence[RankWork], num_microbatches: int, ahead: int
) -> Iterator[tuple[PrefetchPlan, float]]:
    """Yield (plan, milliseconds of a step) until one is good enough.

    A run takes no longer: a rank that waited here until another had room may find it there.
    """
    enough_ms, ahead = GOOD_ENOUGH * ideal_ms(work, num_microbatches), max(ahead, LEAST_HELD)
    for policy in policies(work, num_microbatches, ahead):
        chooser = _Chooser(policy, len(work), num_microbatches, ahead)
        simulated = _Step(work, num_microbatches, policy.boundary, ahead, chooser)
        found_ms = simulated.run()
        if found_ms < NEVER:
            plan = PrefetchPlan(policy.boundary, num_microbatches, simulated.orders(), ahead)
            if max(one.most_held for one in every_rank(plan)) <= ahead:
                yield plan, found_ms
                if found_ms <= enough_ms:
                    return


def policies(work: Sequence[RankWork], num_microbatches: int, ahead: int) -> Iterator[Policy]:
    """Yield the policies that are tried, for at most `ahead` states on a rank."""
    ranks, most = len(work), min(ahead, num_microbatches)
    slowest = max(work, key=lambda one: one.total_ms)
    gaps = round((ranks - 1) * (slowest.forward_ms + slowest.backward_ms) / max(slowest.teacher_ms, 1e-9))
    more = range(-4, 3) if ranks * num_microbatches <= SMALL else range(-2, 1)
    room = sorted({min(num_microbatches, max(0, gaps + one)) for one in more} | {0}, reverse=True)
    starts = range(0, min(most, ranks) + 1, max(1, ranks // 4))
    for stagger, start, in_gaps, patience in product(STAGGERS, starts, room, (0.0, 0.5)):
        if stagger <= ahead:
            yield Policy(Boundary(start, stagger), in_gaps, patience)


def step_ms(plan: PrefetchPlan, work: Sequence[RankWork]) -> float:
    """Return the milliseconds of a step with these orders. UsageError if a run could not follow them."""
    for _ in every_rank(plan):
        pass

    def choose(state: _RankState, ready_ms: float, now: float) -> bool:
        return plan.orders[state.rank][len(state.chosen)] == "T"

    found = _Step(work, plan.num_microbatches, plan.boundary, plan.ahead, choose).run()
    if found == NEVER:
        raise refused("ranks wait for each other")
    return found


class _Exchange:
    """The two sides of an exchange."""

    __slots__ = ("lower_ms", "states", "upper_ms")

    def __init__(self) -> None:
        self.upper_ms = self.lower_ms = NEVER  # when each has posted it
        self.states = 0  # that go down with it

    @property
    def over_ms(self) -> float:
        return max(self.upper_ms, self.lower_ms)


class _RankState:
    """The work of one rank, done and next."""

    __slots__ = (
        "arrived", "behind", "chosen", "clock_ms", "coming", "done", "exchange", "forwards", "inputs",
        "outputs", "position", "rank", "stop", "stops", "teachers", "work",
    )  # fmt: skip

    def __init__(self, rank: int, work: RankWork, stops: Sequence[Stop], done: int, inputs: float):
        self.rank, self.work, self.stops, self.done = rank, work, stops, done
        self.inputs = inputs  # states of the rank before that wait
        self.coming = self.arrived = 0  # that are on their way, and that have come in this step
        self.outputs = 0  # states that the rank behind has not got; on the last rank all
        self.teachers = self.forwards = self.position = 0
        self.stop: Stop | None = None
        self.exchange: _Exchange | None = None  # of the stop
        self.chosen: list[str] = []
        self.clock_ms = 0.0
        self.behind: _RankState | None = None  # the next rank

    def held_behind(self) -> float:
        """Return the states that wait on the next rank, or are on their way."""
        return self.behind.inputs + self.behind.outputs + self.behind.coming if self.behind else 0


Choose = Callable[[_RankState, float, float], bool]
"""(rank, when its exchange is over, now) -> whether the rank begins with a teacher forward."""


@dataclass(frozen=True)
class _Chooser:
    """Decides by a policy."""

    policy: Policy
    ranks: int
    num_microbatches: int
    ahead: int

    def __call__(self, state: _RankState, ready_ms: float, now: float) -> bool:
        assert state.stop is not None, "it chooses at a stop"
        is_forward = state.stop.task == "F"
        if is_forward and state.done + state.teachers < self._needed(state):
            return True
        if state.outputs + state.held_behind() >= self.ahead:
            return False
        turns = 1 - self.policy.in_gaps / self.num_microbatches
        is_due = is_forward and state.teachers < turns * state.forwards
        return is_due or (ready_ms > now + self.policy.patience * state.work.teacher_ms and ready_ms > now)

    def _needed(self, state: _RankState) -> int:
        """Return the teacher forwards of the step before the student's next, so that the loss has its state.

        A state takes an exchange from rank to rank. The one before the last rank's loss n goes with the
        forward n - 1 of the rank before.
        """
        return min(state.forwards + self.ranks - state.rank, self.num_microbatches)


class _Step:
    """A step in which each rank decides what to do next whenever it is free."""

    def __init__(
        self, work: Sequence[RankWork], num_microbatches: int, boundary: Boundary, ahead: int, choose: Choose
    ):
        ranks = len(work)
        self.num_microbatches, self.ahead, self.choose = num_microbatches, ahead, choose
        done = [boundary.done(rank, ranks, num_microbatches) for rank in range(ranks)]
        kept = [NEVER, *(before - own for before, own in zip(done, done[1:], strict=False))]
        self.ranks = [
            _RankState(rank, work[rank], stops(rank, ranks, num_microbatches), done[rank], kept[rank])
            for rank in range(ranks)
        ]
        self.ranks[-1].outputs = done[-1]
        for before, behind in pairwise(self.ranks):
            before.behind = behind
        self.exchanges: dict[tuple[int, int], _Exchange] = {}
        self.events: list[tuple[float, int]] = []

    def run(self) -> float:
        """Let the ranks choose until all are done; return when, `NEVER` if they wait for each other."""
        for state in self.ranks:
            self._enter_next(state, 0.0)
        self.events += [(0.0, state.rank) for state in self.ranks]
        while self.events:
            now, rank = heappop(self.events)
            state = self.ranks[rank]
            while state.clock_ms <= now and state.stop is not None:
                if not self._advance(state, now):
                    break
        is_whole = all(state.stop is None for state in self.ranks)
        return self._ended_ms() if is_whole else NEVER

    def orders(self) -> tuple[str, ...]:
        """Return what the ranks have chosen."""
        return tuple("".join(state.chosen) for state in self.ranks)

    def _enter_next(self, state: _RankState, at_ms: float) -> None:
        """Let a rank come to its next stop, and post the exchange there."""
        state.stop = state.stops[state.position] if state.position < len(state.stops) else None
        state.position += 1
        if state.stop is None:
            state.clock_ms = at_ms
        if state.stop is None or state.stop.link is None:
            state.exchange = None
            return
        key = state.stop.link, state.stop.number
        exchange = self.exchanges.get(key)
        if exchange is None:
            exchange = self.exchanges[key] = _Exchange()
        state.exchange = exchange
        if state.stop.link == state.rank:
            exchange.upper_ms, exchange.states = at_ms, state.outputs
            other = state.rank + 1
            self.ranks[other].coming += state.outputs
            state.outputs = 0
        else:
            exchange.lower_ms, other = at_ms, state.rank - 1
        heappush(self.events, (max(at_ms, self.ranks[other].clock_ms), other))

    def _advance(self, state: _RankState, now: float) -> bool:
        """Let a rank at a stop do something. Return False if it has to wait."""
        stop = state.stop
        assert stop is not None, "`_finish` follows the last one"
        over_ms = 0.0 if state.exchange is None else state.exchange.over_ms
        is_last = state.rank == len(self.ranks) - 1
        lacks_state = is_last and stop.task == "F" and state.outputs < 1
        ready_ms = NEVER if lacks_state else over_ms
        can_teach = stop.has_gap and state.teachers < self.num_microbatches and state.inputs > 0
        if can_teach and self.choose(state, ready_ms, now):
            self._teach(state, now)
            return True
        if ready_ms > now:
            if ready_ms < NEVER:
                heappush(self.events, (ready_ms, state.rank))
            return False
        if stop.link == state.rank - 1:
            assert state.exchange is not None, "a stop with a link has an exchange"
            arrived = state.exchange.states
            state.inputs, state.coming = state.inputs + arrived, state.coming - arrived
            state.arrived += arrived
        if stop.task:
            state.chosen.append(stop.task)
            state.clock_ms = now + state.work.of(stop.task)
            if stop.task == "F":
                state.forwards += 1
                state.outputs -= is_last
            heappush(self.events, (state.clock_ms, state.rank))
        self._enter_next(state, max(now, state.clock_ms))
        return True

    def _teach(self, state: _RankState, now: float) -> None:
        state.chosen.append("T")
        state.teachers, state.inputs, state.outputs = state.teachers + 1, state.inputs - 1, state.outputs + 1
        state.clock_ms = now + state.work.teacher_ms
        heappush(self.events, (state.clock_ms, state.rank))

    def _ended_ms(self) -> float:
        """Return when all ranks have run what remains after their last exchange, and handed it on."""
        clocks = [state.clock_ms for state in self.ranks]
        orders = [list(reversed(self._ending(state))) for state in self.ranks]
        while any(orders):
            before = sum(map(len, orders))
            for state, order in zip(self.ranks, orders, strict=True):
                rank = state.rank
                while order and order[-1] == "T":
                    order.pop()
                    clocks[rank] += state.work.teacher_ms
                    state.chosen.append("T")
                if order and order[-1] == "<" and orders[rank - 1] and orders[rank - 1][-1] == ">":
                    clocks[rank - 1] = clocks[rank] = max(clocks[rank - 1 : rank + 1])
                    order.pop()
                    orders[rank - 1].pop()
            if sum(map(len, orders)) == before:
                return NEVER
        return max(clocks)

    def _ending(self, state: _RankState) -> str:
        inputs, coming = None, 0
        if state.rank:
            inputs, coming = int(state.inputs), self.num_microbatches - state.arrived
        remaining, is_last = self.num_microbatches - state.teachers, state.behind is None
        return ending(inputs, 0 if is_last else state.outputs, remaining, coming, self.ahead, is_last)
