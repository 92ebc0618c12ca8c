"""Held-out evaluation: when it is due, and its pass over the held-out set, forward with training's loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from mkd.config.schema import TrainingConfig
from mkd.data.batch import PackedBatch
from mkd.train.objective import Objective, loss_terms
from mkd.train.step import Engine
from mkd.train.sums import LossSums

VALID, TASKS = "valid", "tasks"
"""The parts of an evaluation, as their records name them: held-out text and held-out tasks."""


def is_last(iteration: int, training: TrainingConfig) -> bool:
    """Return True if this start of the run ends after `iteration` steps."""
    return iteration == training.train_iters or is_due(iteration, training.exit_interval)


def is_evaluated(iteration: int, training: TrainingConfig) -> bool:
    """Return True if a run evaluates after `iteration` steps: at 0, each interval and the end."""
    if not training.evaluates:
        return False
    return is_due(iteration, training.eval_interval) or is_last(iteration, training)


def is_due(iteration: int, interval: int | None) -> bool:
    """Return True if `iteration` ends an interval. Without an interval, no iteration does."""
    return bool(interval) and iteration % interval == 0


def evaluate(engine: Engine, steps: Iterable[Sequence[PackedBatch]]) -> LossSums:
    """Return the sums over all loss tokens of `steps`, equal on every rank and for every layout.

    Each element of `steps` is this data-parallel rank's list of micro-batches of one global batch.
    """
    for stage in engine.stages:
        stage.eval()
    objective = evaluation_objective(engine)
    total = torch.zeros(objective.num_sums, dtype=torch.float64, device=engine.context.device)
    with engine.parameters_gathered(), torch.no_grad():
        for microbatches in steps:
            on_device = [batch.to(engine.context.device) for batch in microbatches]
            total += engine.schedule.run(engine.stages, on_device, objective, forward_only=True)
            objective.reports.clear()
    for stage in engine.stages:
        stage.train()
    return objective.sums(total)


def evaluation_objective(engine: Engine) -> Objective:
    """Return the objective that also measures cross entropy. Counts are 1: there is no gradient."""
    data_term = engine.data_term if engine.data_term and engine.data_term.has_held_out_loss else None
    terms = loss_terms(engine.kd, engine.teachers, True, data_term, engine.tags)
    ones = torch.ones(len(terms), device=engine.context.device)
    return Objective(engine.kd, engine.context, terms, ones)
