"""The training loop: steps, evaluation, logging, checkpoints, in the order they happen."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from mkd.checkpoint.distributed import TrainingPosition, TrainingState
from mkd.checkpoint.folders import iteration_folder
from mkd.checkpoint.hf.hf_assets import HFAssets
from mkd.config.schema import Config
from mkd.data.loader import EvalStream, TrainStream
from mkd.errors import NonFiniteError
from mkd.evaluation.evaluate import TASKS, VALID, evaluate, is_due, is_evaluated, is_last
from mkd.evaluation.task_evaluator import TaskEvaluator, evaluate_tasks, evaluate_teachers, report_tasks
from mkd.faults import fault_at, poison_next_gradient
from mkd.operations.crash_loop import CrashCounter
from mkd.operations.ending import Ending
from mkd.operations.profiling import Profiler
from mkd.operations.stopping import Interruptible, Stop, Stopper
from mkd.operations.watchdog import UNWATCHED, Watchdog
from mkd.run.checkpoints import Saver
from mkd.train.nonfinite import NonFinitePolicy
from mkd.train.report import Reporter
from mkd.train.spikes import SpikeWatch
from mkd.train.step import Engine, train_step


@dataclass
class Run:
    """Everything a run is made of; `setup.build_run` is the only place that makes one."""

    config: Config
    engine: Engine
    train_stream: TrainStream
    eval_stream: EvalStream | None
    tasks: TaskEvaluator | None
    state: TrainingState
    position: TrainingPosition
    reporter: Reporter
    saver: Saver | None  # None without --save
    profiler: Profiler
    stopper: Stopper
    non_finite: NonFinitePolicy
    spikes: SpikeWatch
    crashes: CrashCounter
    watchdog: Watchdog
    ending: Ending  # holds the lock of the save folder, among others
    global_batch_size: int
    assets: HFAssets  # of the student: what an export has besides the weights
    kept_iteration: int  # what there would be if the run ended now: nothing is lost that this has, ...
    kept_in: Path | None  # ... a checkpoint, or None: the student's own weights
    due: frozenset[str] = frozenset()  # parts of the evaluation at `position` that are still to be made

    @property
    def parts(self) -> frozenset[str]:
        """Of an evaluation."""
        return frozenset({VALID} if self.eval_stream is not None else ()) | frozenset(
            {TASKS} if self.tasks else ()
        )


def train(run: Run) -> Stop | None:
    """Run until `train_iters` (or `exit_interval`), evaluating and saving on the way; returns what has stopped it before.

    Held-out data is also evaluated before the first step and after the last, so that every run shows what it gained; a run
    with --save always ends with a checkpoint. One that is stopped saves at once, and makes the rest of an evaluation that was
    due when it goes on.
    """
    training, checkpoint = run.config.training, run.config.checkpoint
    stop = run.stopper.agreed() or evaluate_and_report(run)
    while run.position.iteration < training.train_iters and not stop:
        one_step(run)
        iteration = run.position.iteration
        ends = is_last(iteration, training)
        run.due = run.parts if is_evaluated(iteration, training) else frozenset()
        stop = run.stopper.stop or evaluate_and_report(run)
        if ends or stop:
            run.reporter.flush()
        if run.saver and (ends or stop or is_due(iteration, checkpoint.save_interval)):
            save(run, wait=ends or bool(stop))
        elif run.saver and run.saver.pending:
            run.watchdog.enter("save", iteration)  # publishing may take as long as saving
            run.stopper.took(save_s=run.saver.poll())
        if ends:
            break
    if run.saver:
        run.watchdog.enter("save", run.position.iteration)
        run.saver.finish()
    run.watchdog.stop()
    return stop


def one_step(run: Run) -> None:
    """Fetch, step, advance the position, report. Data are consumed by a step without an update too."""
    iteration, rank = run.position.iteration + 1, run.engine.context.rank
    run.crashes.reached(iteration)
    run.profiler.at(run.position.iteration)
    run.watchdog.enter("data", iteration)
    fault_at("in_data", rank, iteration)
    batches = run.train_stream.next_step()
    on_device = [batch.to(run.engine.context.device) for batch in batches]
    run.watchdog.enter("forward_backward", iteration)
    if fault_at("in_step", rank, iteration):
        poison_next_gradient(run.engine.chunks[-1].parameters())
    start = time.monotonic()

    def all_finite(is_finite: bool) -> bool:
        run.watchdog.enter("optimizer", iteration)
        if fault_at("in_optimizer", rank, iteration):
            return is_finite
        run.stopper.took(step_s=time.monotonic() - start)
        return run.stopper.all_finite(is_finite)

    result = train_step(run.engine, on_device, all_finite)
    run.stopper.took(step_s=result.step_time_ms / 1000)
    try:
        run.non_finite.judge(iteration, result, batches)
    except NonFiniteError:  # on all ranks: a checkpoint that is still being written can be finished
        if run.saver:
            run.watchdog.enter("save", iteration)
            run.saver.finish()
        raise
    run.position = TrainingPosition(
        iteration=iteration,
        consumed_samples=run.position.consumed_samples + run.global_batch_size,
        consumed_tokens=run.position.consumed_tokens + run.global_batch_size * run.config.training.seq_length,
        skipped_iterations=run.position.skipped_iterations + (not result.is_applied),
    )
    is_spike = run.spikes.is_spike(iteration, result, run.train_stream.last_samples)
    run.reporter.train(run.position, result, batches, is_spike)


def evaluate_and_report(run: Run) -> Stop | None:
    """What is due of held-out text, then of held-out tasks; teachers, which never change, do the tasks once.

    Stops between two batches; a part that it has not finished stays due.
    """
    if not run.due:
        return None
    if VALID in run.due:
        steps = Interruptible(run.watchdog.each("eval", run.position.iteration, run.eval_stream), run.stopper)
        sums = evaluate(run.engine, steps)
        if steps.stop:
            return steps.stop
        run.reporter.valid(run.position, sums)
        run.due -= {VALID}
    if TASKS in run.due:
        run.watchdog.enter(UNWATCHED, run.position.iteration)
        metrics = evaluate_tasks(run.tasks, run.engine, run.stopper)
        if metrics is not None and run.position.iteration == 0:
            of_teachers = evaluate_teachers(run.tasks, run.engine, run.stopper)
            metrics = None if of_teachers is None else metrics | of_teachers
        if metrics is None:
            return run.stopper.stop
        report_tasks(run.reporter, run.position, metrics)
        run.due -= {TASKS}
    return run.stopper.agreed()


def save(run: Run, wait: bool) -> None:
    """Save now; without `wait`, --async-save leaves the writing to a thread."""
    start = time.monotonic()
    run.watchdog.enter("save", run.position.iteration)
    with run.engine.parameters_gathered(), run.engine.optimizer.state_on_device():
        run.saver.save(run.state, run.position, wait, run.reporter.open_interval)
    if run.saver.pending is None:  # else it takes longer than this: `poll` will tell
        run.stopper.took(save_s=time.monotonic() - start)
    run.kept_iteration, run.kept_in = (
        run.position.iteration,
        iteration_folder(run.saver.directory, run.position.iteration),
    )
