"""Run the teachers ahead of the student: a pipeline of their own on the same ranks, in the student's gaps.

A plan (`mkd/plan/times/prefetch.py`) says how many teacher forwards a rank runs in which gap of the
student's 1F1B. A gap is between posting a receive and waiting for it. On the first rank, where no forward is
received, it is before a forward. The rest runs after the last backward. A teacher forward takes the states
of the rank before, and the last rank keeps them for the loss.

The first step of a process runs as without a plan. Kernels, their tuning and the student's communicator are
used for the first time there, which may let the host wait for all that the device has queued. With a state
among it, whose receiver waits for this rank, it would wait for ever.

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
from mkd.parallel.pipeline import PipelineCommunicator
from mkd.parallel.state_links import StateLinks
from mkd.plan.times.prefetch import PrefetchPlan
from mkd.plan.times.prefetch_replay import RankGaps
from mkd.train.stage_inputs import teacher_inputs

SampleIds = tuple[int, ...]


class TeacherPrefetch:
    """The teacher forwards of one rank."""

    def __init__(
        self,
        plan: PrefetchPlan,
        stage: DistillationStage,
        communicator: PipelineCommunicator,  # of the student
        links: StateLinks,
        context: ParallelContext,
    ):
        self.stage, self.communicator, self.links, self.context = stage, communicator, links, context
        self.num_microbatches = plan.num_microbatches
        self.gaps = RankGaps.from_plan(plan, context.pp_rank)
        self._queue: deque[PackedBatch] = deque()  # micro-batches whose teacher forwards are still to run
        self._inputs: deque[tuple[Tensor, ...]] = deque()  # received, for the first of the queue
        self._finals: deque[tuple[SampleIds, tuple[Tensor, ...]]] = deque()  # on the last rank
        self._ahead: list[SampleIds] | None = None  # of the next step, done; None: nothing is ahead
        self._has_run_step = False
        self._gaps: Iterator[int] = iter(())

    @property
    def num_ahead(self) -> int:
        """Number of teacher forwards of the next step that are done, between steps."""
        return len(self._ahead or ())

    def for_next_step(self) -> TeacherPrefetch | None:
        """Return this prefetch, or None if the training step that begins is the first of the process."""
        is_first, self._has_run_step = not self._has_run_step, True
        return None if is_first else self

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
        self.communicator.while_waiting = self.fill_gap
        try:
            yield
        finally:
            # Evaluations use the same communicator, whose messages then carry the teachers' states.
            self.communicator.while_waiting = None
        assert next(self._gaps, None) is None and not self._queue, "the step left teacher forwards undone"

    def _begin(self, microbatches: Sequence[PackedBatch], following: Sequence[PackedBatch]) -> None:
        assert len(microbatches) == self.num_microbatches, "the plan is for another number of micro-batches"
        done = self.gaps.done
        begun = [batch.sample_ids for batch in microbatches[:done]]
        if self._ahead is None:  # make now what a step with `following` leaves at its end
            self._queue.extend(microbatches)
            self._run(done)
            self._receive(self.gaps.inputs_kept)
            self.links.wait_for_sends()
        else:
            assert self._ahead == begun, "teacher forwards ahead are of other samples than the step's"
            self._queue.extend(microbatches[done:])
        # Behind the step's own: the last `done` teacher forwards of a step are of the next one.
        self._queue.extend(following[:done])
        self._ahead = [batch.sample_ids for batch in following[:done]] if following else None
        self._gaps = iter(self.gaps.at_waits)

    def fill_gap(self) -> None:
        """Run the teacher forwards of the next gap."""
        self._run(next(self._gaps))

    def finish(self) -> None:
        """Run the teacher forwards after the last backward. No state is under way then."""
        self._run(self.gaps.after)
        if self._ahead is not None:  # take what the rank before has sent: it waits until that has arrived
            self._receive(self.gaps.inputs_kept)
        self.links.wait_for_sends()

    def take(self, sample_ids: SampleIds) -> tuple[Tensor, ...]:
        """Return the teachers' final hidden states of the micro-batch of these samples. Last rank only."""
        ids, states = self._finals.popleft()
        assert ids == sample_ids, f"the teachers' states are of samples {ids}, the student's of {sample_ids}"
        return states

    def _run(self, number: int) -> None:
        """Run that many teacher forwards, or as many as there are."""
        for _ in range(min(number, len(self._queue))):
            batch = self._queue.popleft().to(self.context.device)
            if self.context.pp_rank and not self._inputs:
                self._receive(1)
            received = self._inputs.popleft() if self.context.pp_rank else ()
            joins = self.context.platform.transformer_engine
            rows = teacher_inputs(batch, joins, self.stage.running)
            states = self.stage.forward_teachers(rows, received)
            if self.context.holds_last_stage:
                self._finals.append((batch.sample_ids, states))
            else:
                self.links.send(states)

    def _receive(self, number: int) -> None:
        self._inputs.extend(self.links.receive() for _ in range(number))
