"""The training loop: steps, evaluation, logging, checkpoints, in the order they happen."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from mkd.checkpoint.distributed import TrainingPosition, TrainingState
from mkd.config.schema import Config
from mkd.data.loader import EvalStream, TrainStream
from mkd.errors import NonFiniteError
from mkd.faults import fault_at, poison_next_gradient
from mkd.train.checkpoints import Saver
from mkd.train.crash_loop import CrashCounter
from mkd.train.eval_tasks import TaskEvaluator, evaluate_tasks, evaluate_teachers, report_tasks
from mkd.train.evaluate import evaluate
from mkd.train.nonfinite import NonFinitePolicy
from mkd.train.profiling import Profiler
from mkd.train.report import Reporter
from mkd.train.step import Engine, train_step
from mkd.train.stopping import Interruptible, Stop, Stopper
from mkd.train.watchdog import UNWATCHED, Watchdog


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
    crashes: CrashCounter
    watchdog: Watchdog
    global_batch_size: int
    hf_dir: Path | None  # configuration and tokenizer files of the student


def train(run: Run) -> Stop | None:
    """Run until `train_iters` (or `exit_interval`), evaluating and saving on the way; returns what has stopped it before.

    Held-out data is also evaluated before the first step and after the last, so that every run shows what it gained; a run
    with --save always ends with a checkpoint. One that is stopped saves at once, without an evaluation.
    """
    training, checkpoint = run.config.training, run.config.checkpoint
    has_held_out = run.eval_stream is not None or run.tasks is not None
    evaluates = has_held_out and bool(training.eval_interval)
    stop = run.stopper.agreed()
    if evaluates and run.position.iteration == 0 and not stop:
        stop = evaluate_and_report(run)
    saved = run.position.iteration  # nothing is lost that a checkpoint, or the student's own weights, do not have
    while run.position.iteration < training.train_iters and not stop:
        one_step(run)
        iteration = run.position.iteration
        is_last = iteration == training.train_iters or _due(iteration, training.exit_interval)
        stop = run.stopper.stop
        if evaluates and (is_last or _due(iteration, training.eval_interval)) and not stop:
            stop = evaluate_and_report(run)
        if run.saver and (is_last or stop or _due(iteration, checkpoint.save_interval)) and iteration > saved:
            save(run, wait=is_last or bool(stop))
            saved = iteration
        elif run.saver:
            run.stopper.took(save_s=run.saver.poll())
        if is_last:
            break
    if run.saver:
        run.watchdog.enter("save", run.position.iteration)
        run.saver.finish()
        run.saver.close()
    run.watchdog.stop()
    run.reporter.flush()
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

    result = train_step(run.engine, on_device, run.global_batch_size, all_finite)
    run.stopper.took(step_s=result.step_time_ms / 1000)
    try:
        run.non_finite.judge(iteration, result, batches)
    except NonFiniteError:  # on all ranks: a checkpoint that is still being written can be finished
        if run.saver:
            run.saver.finish()
        raise
    run.position = TrainingPosition(
        iteration=iteration,
        consumed_samples=run.position.consumed_samples + run.global_batch_size,
        skipped_iterations=run.position.skipped_iterations + (not result.is_applied),
    )
    run.reporter.train(run.position, result, batches)


def evaluate_and_report(run: Run) -> Stop | None:
    """Held-out text, then held-out tasks; teachers, which never change, do the tasks once. Stops between two batches."""
    if run.eval_stream is not None:
        steps = Interruptible(run.watchdog.each("eval", run.position.iteration, run.eval_stream), run.stopper)
        sums = evaluate(run.engine, steps)
        if steps.stop:
            return steps.stop
        run.reporter.valid(run.position, sums)
    if run.tasks is not None:
        run.watchdog.enter(UNWATCHED, run.position.iteration)
        metrics = evaluate_tasks(run.tasks, run.engine)
        if run.position.iteration == 0:
            metrics |= evaluate_teachers(run.tasks, run.engine)
        report_tasks(run.reporter, run.position, metrics)
    return run.stopper.agreed()


def save(run: Run, wait: bool) -> None:
    """Save now; without `wait`, --async-save leaves the writing to a thread."""
    start = time.monotonic()
    run.watchdog.enter("save", run.position.iteration)
    with run.engine.parameters_gathered(), run.engine.optimizer.state_on_device():
        run.saver.save(run.state, run.position, wait)
    run.stopper.took(save_s=time.monotonic() - start)


def _due(iteration: int, interval: int | None) -> bool:
    return bool(interval) and iteration % interval == 0
