"""The training loop: steps, evaluation, logging, checkpoints, in the order they happen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mkd.checkpoint.distributed import TrainingPosition, TrainingState, save_checkpoint
from mkd.config.schema import Config
from mkd.data.loader import EvalStream, TrainStream
from mkd.train.evaluate import evaluate
from mkd.train.report import Reporter
from mkd.train.step import Engine, train_step


@dataclass
class Run:
    """Everything a run is made of; `setup.build_run` is the only place that makes one."""

    config: Config
    engine: Engine
    train_stream: TrainStream
    eval_stream: EvalStream | None
    state: TrainingState
    position: TrainingPosition
    reporter: Reporter
    global_batch_size: int
    hf_dir: Path | None  # configuration and tokenizer files of the student


def train(run: Run) -> None:
    """Run until `train_iters` (or `exit_interval`), evaluating and saving on the way."""
    training, checkpoint = run.config.training, run.config.checkpoint
    saved_at = run.position.iteration
    while run.position.iteration < training.train_iters:
        one_step(run)
        iteration = run.position.iteration
        if run.eval_stream is not None and _due(iteration, training.eval_interval):
            evaluate_and_report(run)
        if checkpoint.save and _due(iteration, checkpoint.save_interval):
            save(run)
            saved_at = iteration
        if _due(iteration, training.exit_interval):
            break
    if checkpoint.save and saved_at != run.position.iteration:
        save(run)


def one_step(run: Run) -> None:
    """Fetch, step, advance the position, report."""
    batches = [batch.to(run.engine.context.device) for batch in run.train_stream.next_step()]
    result = train_step(run.engine, batches, run.global_batch_size)
    run.position = TrainingPosition(
        iteration=run.position.iteration + 1,
        consumed_samples=run.position.consumed_samples + run.global_batch_size,
        skipped_iterations=run.position.skipped_iterations,
    )
    run.reporter.train(run.position, result, batches)


def evaluate_and_report(run: Run) -> None:
    run.reporter.valid(run.position, evaluate(run.engine, run.eval_stream))


def save(run: Run) -> None:
    with run.engine.parameters_gathered():
        folder = save_checkpoint(
            Path(run.config.checkpoint.save), run.state, run.position, run.engine.context, run.hf_dir
        )
    run.reporter.note(f"saved checkpoint {folder}")


def _due(iteration: int, interval: int | None) -> bool:
    return bool(interval) and iteration % interval == 0
