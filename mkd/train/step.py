"""One optimizer step: the page to read first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.config.schema import KDConfig
from mkd.data.batch import PackedBatch
from mkd.operations.phases import FORWARD_BACKWARD, OPTIMIZER
from mkd.operations.stopping import StepAgreement, Stop, without_peers
from mkd.parallel.context import ParallelContext
from mkd.train.objective import Objective
from mkd.train.optimizer import StudentOptimizer
from mkd.train.schedule import PipelineSchedule
from mkd.train.sums import LossSums
from mkd.train.teachers.teacher_loss import TeacherLoss


@dataclass(frozen=True)
class Engine:
    """What a step needs: the chunks of this rank, the schedule that runs them, and the optimizer that changes them."""

    kd: KDConfig
    context: ParallelContext
    schedule: PipelineSchedule
    chunks: list  # DDP-wrapped DistillationStage, one per virtual stage
    optimizer: StudentOptimizer
    teachers: tuple[TeacherLoss, ...]  # how each teacher is compared with the student

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
    """The sums of one global batch, and what the update reported."""

    sums: LossSums
    grad_norm: float
    learning_rate: float  # of this update, also where it is not applied
    step_time_ms: float
    is_applied: bool = True  # the update; else the loss or a gradient of some rank was not finite
    stop: Stop | None = None  # why all ranks end the run after this step
    reports: Sequence[
        tuple[tuple[int, ...], LossSums]
    ] = ()  # then: sample ids and sums of this rank's micro-batches


def train_step(
    engine: Engine,
    microbatches: Sequence[PackedBatch],
    exchange: Callable[[bool], StepAgreement] = without_peers,  # see StudentOptimizer.update
    phase: Callable[[str], AbstractContextManager] = nullcontext,  # entered for each part of the step
) -> StepResult:
    """Forward of teachers and student, backward, update. `microbatches` are this data-parallel rank's, already on the device.

    The loss is `sum over rows / M` with M counted over the global batch before the first forward, so that neither the loss
    nor any gradient depends on the layout; rows are loss tokens, or chunks for a teacher with its own tokens.
    """
    start = time.perf_counter()
    with phase(FORWARD_BACKWARD):
        engine.optimizer.zero_grad()
        objective = training_objective(engine, microbatches)
        sums = objective.sums(engine.schedule.run(engine.chunks, microbatches, objective, forward_only=False))
    with phase(OPTIMIZER):
        learning_rate = engine.optimizer.learning_rate
        grad_norm, agreed = engine.optimizer.update(sums.token_sums()["loss"], exchange)
    reports = () if agreed.finite else [(ids, objective.sums(vector)) for ids, vector in objective.reports]
    duration_ms = 1000 * (time.perf_counter() - start)
    return StepResult(sums, grad_norm, learning_rate, duration_ms, agreed.finite, agreed.stop, reports)


def training_objective(engine: Engine, microbatches: Sequence[PackedBatch]) -> Objective:
    """The objective of one step, with the counts of its global batch. Collective."""
    counts = count_rows(microbatches, len(engine.teachers), engine.context)
    return Objective(
        engine.kd, engine.context, engine.teachers, 1.0 / counts.clamp(min=1).float(), reports=[]
    )


def count_rows(microbatches: Sequence[PackedBatch], num_teachers: int, context: ParallelContext) -> Tensor:
    """Rows of the whole global batch, int64 [1 + teachers] (all-reduce SUM over data parallel; no backward).

    Loss tokens, then for each teacher what it is compared on: the loss tokens, or the chunks of a teacher with its own tokens.
    """
    counts = [_rows(batch, num_teachers) for batch in microbatches]
    total = torch.tensor(counts, dtype=torch.int64, device=context.device).sum(dim=0)
    dist.all_reduce(total, group=context.dp_group)
    return total


def _rows(batch: PackedBatch, num_teachers: int) -> list[int]:
    teachers = batch.teachers or (None,) * num_teachers
    return [
        batch.num_loss_tokens,
        *(batch.num_loss_tokens if one is None else one.chunks.num_chunks for one in teachers),
    ]
