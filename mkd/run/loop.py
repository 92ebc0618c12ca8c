"""The training loop: steps, evaluation, logging and checkpoints, in the order in which they happen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mkd.checkpoint.distributed import TrainingState
from mkd.checkpoint.folders import BY_STEPS, BY_TIME, LAST, STOPPED, TrainingPosition, iteration_folder
from mkd.config.schema import Config
from mkd.data.batch import PackedBatch
from mkd.data.loader import EvalStream, TrainStream
from mkd.errors import NonFiniteError, ServerLost
from mkd.evaluation.evaluate import TASKS, VALID, evaluate, is_due, is_evaluated, is_last
from mkd.evaluation.task_evaluator import TaskEvaluator, evaluate_tasks, evaluate_teachers, report_tasks
from mkd.kinds.averaged.averaged_teachers import changing_teachers
from mkd.kinds.sampled.rollout_meter import RolloutMeter
from mkd.kinds.sampled.rollout_stream import RolloutStream
from mkd.operations.console import LOG
from mkd.operations.phases import DATA, END, EVAL, SAVE, TASK_EVALUATION, Phases
from mkd.operations.stopping import Interruptible, Stop, Stopper
from mkd.resolve.run_plan import Plan
from mkd.run.checkpoints import Saver
from mkd.train.nonfinite import NonFinitePolicy
from mkd.train.report import Reporter
from mkd.train.spikes import SpikeWatch
from mkd.train.step import Engine, StepResult, train_step


@dataclass
class DataStreams:
    """The batches of this rank for training and for evaluations."""

    train: TrainStream | RolloutStream
    valid: EvalStream | None  # held-out text; None: there is none
    tasks: TaskEvaluator | None  # held-out tasks; None: there are none

    @property
    def parts(self) -> frozenset[str]:
        """Parts of an evaluation, as their records name them."""
        return frozenset({VALID} if self.valid is not None else ()) | frozenset({TASKS} if self.tasks else ())


@dataclass
class Guards:
    """Checks after every step whether the run may continue."""

    stopper: Stopper
    non_finite: NonFinitePolicy
    spikes: SpikeWatch


@dataclass
class Progress:
    """Position of a run, and the state that would be kept if it ended now."""

    position: TrainingPosition
    kept_iteration: int  # iteration of `kept_in`
    kept_in: Path | None  # latest checkpoint; None: the student's own weights
    due: frozenset[str] = frozenset()  # parts of the evaluation at `position` that are still to be done


@dataclass
class Run:
    """All parts of a run. Only `setup.build_run` creates one."""

    plan: Plan
    engine: Engine
    state: TrainingState
    data: DataStreams
    progress: Progress
    guards: Guards
    reporter: Reporter
    saver: Saver | None  # None without --save
    meter: RolloutMeter | None  # None: the run has no rollouts
    phase: Phases  # announces what the run is doing: `with run.phase("data", iteration)`

    @property
    def config(self) -> Config:
        """Settings of the run."""
        return self.plan.config

    @property
    def position(self) -> TrainingPosition:
        """Steps, samples and tokens so far."""
        return self.progress.position


def train(run: Run) -> Stop | None:
    """Run until `train_iters` (or `exit_interval`), evaluating and saving on the way.

    Return what stopped it early. Held-out data is also evaluated before the first step and after the last, so
    that every run shows what it gained. A run with --save always ends with a checkpoint. A stopped run saves
    at once. When it resumes, it completes any evaluation that was still due.
    """
    training = run.config.training
    # A signal during the start stops the run before its first evaluation.
    stop = run.guards.stopper.agreed() or evaluate_and_report(run)
    while run.position.iteration < training.train_iters and not stop:
        before = run.position.iteration
        stop = one_step(run)
        iteration = run.position.iteration
        ends = is_last(iteration, training)
        if iteration > before:  # false if the sampling server was lost
            run.progress.due = run.data.parts if is_evaluated(iteration, training) else frozenset()
        if ends:  # the line of these steps comes before that of the evaluation
            run.reporter.flush()
        stop = stop or evaluate_and_report(run)
        if stop and not run.saver:  # else the checkpoint keeps the interval, and the resumed run prints it
            run.reporter.flush()
        cause = save_cause(run, ends, stop)
        # After the evaluation, so that a checkpoint knows which parts are done.
        if run.saver and cause and (iteration > before or iteration > run.progress.kept_iteration):
            save(run, cause, wait=ends or bool(stop))
        elif run.saver and run.saver.pending:
            with run.phase(SAVE, iteration):  # publishing may take as long as saving
                run.guards.stopper.took(save_s=run.saver.poll())
        if ends:
            break
    finish_save(run)  # the run ends only when its checkpoint is on the disk
    run.phase.enter(END, run.position.iteration)
    return stop


def one_step(run: Run) -> Stop | None:
    """Fetch, step, advance (also without an update), report; return why the run ends after this step."""
    iteration = run.position.iteration + 1
    with run.phase(DATA, iteration):
        try:
            batches = run.data.train.next_step()
        except ServerLost as lost:  # on all ranks: what was trained is kept
            LOG.warning("%s", lost)
            return Stop(lost.what, is_preempted=True)
        on_device = [batch.to(run.engine.context.device) for batch in batches]
        looks_ahead = run.engine.schedule.looks_ahead and not is_last(iteration, run.config.training)
        following = run.data.train.following_step() if looks_ahead else ()
    if run.meter is not None:
        run.meter.start()
    result = updates(run, iteration, batches, on_device, following)
    # Before the report, whose record has the new position.
    run.progress.position = advance(run, is_applied=result.is_applied)
    is_spike = run.guards.spikes.is_spike(iteration, result, run.data.train.last_samples)
    figures = run.meter.finish() if run.meter is not None else {}
    run.reporter.train(run.position, result, batches, is_spike, run.data.train.step_packs, figures)
    return result.stop


def updates(
    run: Run,
    iteration: int,
    batches: Sequence[PackedBatch],
    on_device: Sequence[PackedBatch],
    following: Sequence[PackedBatch],
) -> StepResult:
    """Make the updates of an iteration: one, or --rollout-updates with the same completions.

    Return the result of the last, with the time of all. A skipped update makes it a step without an update.
    """
    phase, count = partial(run.phase, iteration=iteration), run.config.grpo.rollout_updates
    results: list[StepResult] = []
    for update in range(count):
        observe = run.meter if update == 0 else None  # it compares with the weights that sampled
        is_last_update = update == count - 1
        # A teacher on processes of its own is asked for the states of the next update during this one.
        again = on_device if run.engine.schedule.remote else ()
        result = train_step(
            run.engine,
            on_device,
            exchange=run.guards.stopper.exchange,
            phase=phase,
            following=following if is_last_update else again,
            observe=observe,
            ends_iteration=is_last_update,
        )
        results.append(result)
        try:
            run.guards.non_finite.judge(iteration, result, batches)
        except NonFiniteError:  # raised on all ranks, so that a save in the background can be finished
            finish_save(run, iteration)
            raise
    stop = next((one.stop for one in results if one.stop is not None), None)
    is_applied, step_time_ms = (
        all(one.is_applied for one in results),
        sum(one.step_time_ms for one in results),
    )
    return replace(results[-1], is_applied=is_applied, step_time_ms=step_time_ms, stop=stop)


def advance(run: Run, is_applied: bool) -> TrainingPosition:
    """Return the position after one more step, with or without its update."""
    stream = run.data.train
    return TrainingPosition(
        iteration=run.position.iteration + 1,
        consumed_samples=stream.consumed_samples,
        consumed_tokens=run.position.consumed_tokens + stream.step_packs * run.config.training.seq_length,
        skipped_iterations=run.position.skipped_iterations + (not is_applied),
        consumed_prompts=stream.consumed_prompts,
    )


def evaluate_and_report(run: Run) -> Stop | None:
    """Do the due parts: held-out text, then tasks. A part that stops between two batches stays due."""
    progress, stopper, iteration = run.progress, run.guards.stopper, run.position.iteration
    if not progress.due:
        return None
    if VALID in progress.due:
        steps = Interruptible(run.phase.each(EVAL, iteration, run.data.valid), stopper)
        sums = evaluate(run.engine, steps)
        if steps.stop:
            return steps.stop
        run.reporter.valid(run.position, sums)
        progress.due -= {VALID}
    if TASKS in progress.due:
        with run.phase(TASK_EVALUATION, iteration):
            metrics = evaluate_tasks(run.data.tasks, run.engine, stopper)
            if metrics is not None:
                # The others never change, so they are evaluated once.
                names = changing_teachers(run.config) if iteration else None
                of_teachers = evaluate_teachers(run.data.tasks, run.engine, stopper, names)
                metrics = None if of_teachers is None else metrics | of_teachers
        if metrics is None:
            return stopper.stop
        report_tasks(run.reporter, run.position, metrics)
        progress.due -= {TASKS}
    return stopper.agreed()


def save_cause(run: Run, ends: bool, stop: Stop | None) -> str | None:
    """Return why the run saves after this step; None: it does not."""
    if ends or is_due(run.position.iteration, run.config.checkpoint.save_interval):
        return LAST if ends else BY_STEPS
    if stop:
        return STOPPED
    return BY_TIME if run.guards.stopper.save_is_due else None


def save(run: Run, cause: str, wait: bool) -> None:
    """Save now. Without `wait`, --async-save leaves the writing to a thread."""
    start, position = time.monotonic(), run.position
    gathered, exact = run.engine.parameters_gathered(), run.engine.optimizer.exact_weights()
    with run.phase(SAVE, position.iteration), gathered, exact:
        run.saver.save(run.state, position, wait, run.reporter.open_interval, cause)
    if run.saver.pending is None:  # otherwise it is still being written, and `poll` will return its duration
        run.guards.stopper.took(save_s=time.monotonic() - start)
    run.guards.stopper.saved()
    run.progress.kept_iteration = position.iteration
    run.progress.kept_in = iteration_folder(run.saver.directory, position.iteration)


def finish_save(run: Run, iteration: int | None = None) -> None:
    """Wait for a save in the background."""
    if run.saver:
        with run.phase(SAVE, run.position.iteration if iteration is None else iteration):
            run.saver.finish()
