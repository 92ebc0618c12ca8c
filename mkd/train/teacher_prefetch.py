"""Run the teachers ahead of the student: a pipeline of their own on the same ranks, in the student's gaps.

A plan (`mkd/plan/times/prefetch.py`) says how many teacher forwards a rank runs in which gap of the
student's 1F1B. A gap is between posting a receive and waiting for it. On the first rank, where no forward is
received, it is before a forward. The states go to the next rank with the student's messages: with each, all
that are there. The last rank keeps them for the loss.

So no message is added to the student's while it trains. 1F1B gets through even if every rank waits for each
of its messages at once, so that it gets through here, too, wherever a rank stops for its device: at the first
use of a kernel, in a recording of graphs, or when memory is given back.

At the end of a step the teachers have begun with the next one. Nothing of that is saved: a run that resumes
makes these states again. Evaluations do not touch them: there the stages run the teachers, as without a plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from mkd.data.batch import PackedBatch
from mkd.models.stage import DistillationStage
from mkd.parallel.context import ParallelContext
from mkd.parallel.pipeline import PipelineCommunicator, State
from mkd.plan.times.prefetch import PrefetchPlan, RankGaps, ending
from mkd.train.stage_inputs import teacher_inputs

SampleIds = tuple[int, ...]


class TeacherPrefetch:
    """The teacher forwards of one rank."""

    def __init__(
        self,
        plan: PrefetchPlan,
        stage: DistillationStage,
        communicator: PipelineCommunicator,  # of the student
        context: ParallelContext,
    ):
        self.stage, self.communicator, self.context = stage, communicator, context
        self.num_microbatches = plan.num_microbatches
        self.plan = RankGaps.from_plan(plan, context.pp_rank)
        self._queue: deque[PackedBatch] = deque()  # micro-batches whose teacher forwards are still to run
        self._inputs: deque[State] = deque()  # of the rank before, for the first of the queue
        self._outputs: list[State] = []  # that the next rank has not got
        self._finals: deque[tuple[SampleIds, State]] = deque()  # on the last rank
        self._ahead: list[SampleIds] | None = None  # of the next step, done; None: nothing is ahead
        self._to_come = self._to_go = 0  # states that this step still brings, and takes away
        self._gaps: Iterator[int] = iter(())
        self._arrivals: Iterator[int] = iter(())
        self._departures: Iterator[int] = iter(())

    @property
    def num_ahead(self) -> int:
        """Number of teacher forwards of the next step that are done, between steps."""
        return len(self._ahead or ())

    @contextmanager
    def step(
        self,
        microbatches: Sequence[PackedBatch],
        following: Sequence[PackedBatch],  # of the next step; (): nothing runs ahead at the end of this one
    ) -> Iterator[None]:
        """Run teacher forwards while the student trains on `microbatches`. The caller calls `finish` inside.

        A step with nothing ahead begins with filling the teachers' pipeline.
        """
        self._begin(microbatches, following)
        self.communicator.passengers = self
        try:
            yield
        finally:
            # Evaluations use the same communicator, whose messages then carry the teachers' states.
            self.communicator.passengers = None
        done = [next(one, None) is None for one in (self._gaps, self._arrivals, self._departures)]
        assert all(done) and not (self._queue or self._to_come or self._to_go), (
            "the step left teacher forwards undone"
        )

    def _begin(self, microbatches: Sequence[PackedBatch], following: Sequence[PackedBatch]) -> None:
        assert len(microbatches) == self.num_microbatches, "the plan is for another number of micro-batches"
        done = self.plan.done
        begun = [batch.sample_ids for batch in microbatches[:done]]
        if self._ahead is None:  # make now what a step with `following` leaves at its end
            self._queue.extend(microbatches)
            self._fill()
        else:
            assert self._ahead == begun, "teacher forwards ahead are of other samples than the step's"
            self._queue.extend(microbatches[done:])
        # Behind the step's own: the last `done` teacher forwards of a step are of the next one.
        self._queue.extend(following[:done])
        self._ahead = [batch.sample_ids for batch in following[:done]] if following else None
        done_before = done + self.plan.inputs_kept  # by the rank before
        self._to_come = self.num_microbatches - (0 if following else done_before)
        self._to_go = self.num_microbatches - (0 if following else done)
        self._to_come *= self.context.pp_rank > 0
        self._to_go *= not self.context.holds_last_stage
        self._gaps, self._arrivals = iter(self.plan.gaps), iter(self.plan.arrivals)
        self._departures = iter(self.plan.departures)

    def _fill(self) -> None:
        """Run the first teacher forwards; one after another goes from rank to rank."""
        for number in range(self.plan.done + self.plan.inputs_kept):
            if self.context.pp_rank:
                self._inputs += self.communicator.receive_states(1)
            if number < self.plan.done:
                self._run(1)
                self._hand_on()

    def departing(self) -> list[State]:
        """Return the states that go with the next exchange with the rank behind: all that are there."""
        states, self._outputs = self._outputs, []
        expected = min(next(self._departures), self._to_go)
        assert len(states) == expected, f"{len(states)} states leave, the next rank expects {expected}"
        self._to_go -= expected
        return states

    def arriving(self) -> int:
        """Return how many come with the next exchange with the rank before."""
        number = min(next(self._arrivals), self._to_come)
        self._to_come -= number
        return number

    def arrived(self, states: Sequence[State]) -> None:
        """Take the states that have come."""
        self._inputs += states

    def fill_gap(self) -> None:
        """Run the teacher forwards of the next gap."""
        self._run(next(self._gaps))

    def finish(self) -> None:
        """Run the teacher forwards after the last backward, and hand states on, in the order of `ending`."""
        inputs = len(self._inputs) if self.context.pp_rank else None
        counts = len(self._outputs), len(self._queue), self._to_come, self.plan.ahead
        for kind in ending(inputs, *counts, self.context.holds_last_stage):
            if kind == "T":
                self._run(1)
            elif kind == "<":
                self._inputs += self.communicator.receive_states(1)
                self._to_come -= 1
            else:
                self.communicator.send_states([self._outputs.pop(0)])
                self._to_go -= 1

    def take(self, sample_ids: SampleIds) -> tuple[Tensor, ...]:
        """Return the teachers' final hidden states of the micro-batch of these samples. Last rank only."""
        ids, states = self._finals.popleft()
        assert ids == sample_ids, f"the teachers' states are of samples {ids}, the student's of {sample_ids}"
        return states

    def _run(self, number: int) -> None:
        """Run that many teacher forwards, or as many as there are."""
        joins = self.context.platform.transformer_engine
        for _ in range(min(number, len(self._queue))):
            batch = self._queue.popleft().to(self.context.device)
            received = self._inputs.popleft() if self.context.pp_rank else ()
            rows = teacher_inputs(batch, joins, self.stage.running)
            states = self.stage.forward_teachers(rows, received)
            if self.context.holds_last_stage:
                self._finals.append((batch.sample_ids, states))
            else:
                self._outputs.append(states)

    def _hand_on(self) -> None:
        if self._outputs:
            self.communicator.send_states(self._outputs)
            self._outputs = []
