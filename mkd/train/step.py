"""One optimizer step: the page to read first."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.config.schema import KDConfig
from mkd.data.batch import PackedBatch
from mkd.parallel.context import ParallelContext
from mkd.train.objective import SUMS, Objective
from mkd.train.optimizer import StudentOptimizer
from mkd.train.schedule import PipelineSchedule


@dataclass(frozen=True)
class Engine:
    """What a step needs: the chunks of this rank, the schedule that runs them, and the optimizer that changes them."""

    kd: KDConfig
    context: ParallelContext
    schedule: PipelineSchedule
    chunks: list  # DDP-wrapped PairStage, one per virtual stage
    optimizer: StudentOptimizer

    @contextmanager
    def parameters_gathered(self) -> Iterator[None]:
        """All parameters are whole inside: with overlapped parameter gathers, forward hooks would fetch them late."""
        overlapped = [chunk for chunk in self.chunks if chunk.ddp_config.overlap_param_gather]
        for chunk in overlapped:
            chunk.disable_forward_pre_hook(param_sync=True)
        yield
        for chunk in overlapped:
            chunk.enable_forward_pre_hook()


@dataclass(frozen=True)
class StepResult:
    """Sums over the loss tokens of one global batch (see `objective.SUMS`), and what the update reported."""

    sums: dict[str, float]
    grad_norm: float
    learning_rate: float  # that this update used
    step_time_ms: float


def train_step(engine: Engine, microbatches: Sequence[PackedBatch], num_samples: int) -> StepResult:
    """Forward of teacher and student, backward, update. `microbatches` are this data-parallel rank's, already on the device.

    The loss is `sum over loss tokens / M` with M counted over the global batch before the first forward, so that neither
    the loss nor any gradient depends on the layout. Raises NonFiniteError, before the update, on every rank.
    """
    start = time.perf_counter()
    engine.optimizer.zero_grad()
    num_loss_tokens = count_loss_tokens(microbatches, engine.context)
    objective = Objective(engine.kd, engine.context, 1.0 / num_loss_tokens.clamp(min=1).float())
    sums = engine.schedule.run(engine.chunks, microbatches, objective, forward_only=False)
    reported = dict(zip(SUMS, sums.tolist(), strict=True))
    learning_rate = engine.optimizer.learning_rate
    grad_norm = engine.optimizer.update(reported["loss"], num_samples)
    return StepResult(reported, grad_norm, learning_rate, 1000 * (time.perf_counter() - start))


def count_loss_tokens(microbatches: Sequence[PackedBatch], context: ParallelContext) -> Tensor:
    """Loss tokens of the whole global batch, int64 [] (all-reduce SUM over data parallel; no backward)."""
    count = torch.tensor(sum(b.num_loss_tokens for b in microbatches), dtype=torch.int64, device=context.device)
    dist.all_reduce(count, group=context.dp_group)
    return count
