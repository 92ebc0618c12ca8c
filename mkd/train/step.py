"""One optimizer step: the page to read first.

The global batch is cut into micro-batches, and each of them passes through all stages of the pipeline
(schedule.py). On every stage the frozen teachers run first, then the student (models/stage.py). The last
stage compares their final hidden states (objective.py), term by term: the cross entropy with the data, or
the loss that a kind of run puts in its place (mkd/kinds), and the divergence from each teacher (teachers/).
Then the optimizer makes one update (optimizer.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from mkd.checkpoint.rounded_runs import ROUNDING
from mkd.config.schema import KDConfig
from mkd.data.batch import PackedBatch
from mkd.operations.phases import FORWARD_BACKWARD, OPTIMIZER
from mkd.operations.stopping import StepAgreement, Stop, without_peers
from mkd.parallel.context import ParallelContext
from mkd.train.expert_monitor import ExpertMonitor
from mkd.train.input_rounding import RoundedInputs
from mkd.train.objective import Objective, loss_terms
from mkd.train.optimizer import StudentOptimizer
from mkd.train.schedule import PipelineSchedule
from mkd.train.sums import LossSums
from mkd.train.teachers.base import DataTerm, LossInput, Teacher, Term
from mkd.train.teachers.routed_terms import RunTags, TagTokens, tokens_to_count, with_token_shares


@dataclass(frozen=True)
class Engine:
    """Everything that a step needs on this rank."""

    kd: KDConfig
    context: ParallelContext
    schedule: PipelineSchedule  # runs the stages
    stages: list[DistributedDataParallel]  # by virtual stage: each wraps a DistillationStage
    optimizer: StudentOptimizer  # updates the student's part of them
    teachers: tuple[Teacher, ...]  # how each teacher is compared with the student
    experts: ExpertMonitor | None = None  # None: the student is dense
    data_term: DataTerm | None = None  # takes the place of the cross entropy; None: the run has that
    rounded_inputs: RoundedInputs | None = None  # None: inputs of the student's matrices are exact
    tags: RunTags | None = None  # None: all records have all teachers

    @contextmanager
    def parameters_gathered(self) -> Iterator[None]:
        """Gather all parameters inside the block. Overlapped parameter gathers would fetch them late."""
        overlapped = [stage for stage in self.stages if stage.ddp_config.overlap_param_gather]
        for stage in overlapped:
            stage.disable_forward_pre_hook(param_sync=True)
        try:
            yield
        finally:
            for stage in overlapped:
                stage.enable_forward_pre_hook()

    def rounding_entry(self) -> dict[str, object]:
        """Return the entry of mkd.json about a rounded student; {} if it is not rounded. Collective."""
        weights, inputs = self.optimizer.rounded, self.rounded_inputs
        if weights is None:
            return {}
        return {ROUNDING: weights.rounding.as_json() | ({} if inputs is None else inputs.entry())}


@dataclass(frozen=True)
class StepResult:
    """The sums of one global batch, and the outcome of the update."""

    sums: LossSums
    grad_norm: float
    learning_rate: float  # of this step, even if its update was skipped
    step_time_ms: float
    is_applied: bool = True  # False: the loss or a gradient of some rank was not finite
    stop: Stop | None = None  # reason why all ranks end the run after this step
    reports: Sequence[tuple[tuple[int, ...], LossSums]] = ()
    """Sample ids and sums of each micro-batch of this rank, only if the update was skipped."""
    expert_load: Mapping[str, float] = field(default_factory=dict)  # metrics of the student's experts


def train_step(
    engine: Engine,
    microbatches: Sequence[PackedBatch],  # of this data-parallel rank, on the device
    exchange: Callable[[bool], StepAgreement] = without_peers,  # see StudentOptimizer.update
    phase: Callable[[str], AbstractContextManager[object]] = nullcontext,  # entered for each part of the step
    following: Sequence[PackedBatch] = (),  # of the next step, for teachers that run ahead; (): none is known
    observe: Callable[[LossInput], None] | None = None,  # called on the last stage for every micro-batch
    ends_iteration: bool = True,  # see StudentOptimizer.update
) -> StepResult:
    """Run teachers and student forward, the student backward, and update it.

    Losses are sums over rows, divided by the number of rows in the global batch. The rows are counted before
    the first forward pass, so that neither the loss nor any gradient depends on the layout.
    """
    start = time.perf_counter()
    with phase(FORWARD_BACKWARD):
        engine.optimizer.zero_grad()
        objective = training_objective(engine, microbatches, observe)
        report = engine.schedule.run(
            engine.stages, microbatches, objective, forward_only=False, following=following
        )
        sums, load = objective.sums(report), {}
        if engine.experts is not None:
            routed = engine.experts.finish_step()
            sums, load = routed.added_to(sums), routed.load
    with phase(OPTIMIZER):
        learning_rate = engine.optimizer.learning_rate
        grad_norm, agreed = engine.optimizer.update(sums.token_sums()["loss"], exchange, ends_iteration)
        if engine.experts is not None and agreed.finite:
            engine.experts.move_biases(routed)
        if engine.rounded_inputs is not None:
            engine.rounded_inputs.finish_step(agreed.finite)
    step_time_ms = 1000 * (time.perf_counter() - start)
    reports = () if agreed.finite else [(ids, objective.sums(one)) for ids, one in objective.reports]
    return StepResult(
        sums,
        grad_norm,
        learning_rate,
        step_time_ms,
        is_applied=agreed.finite,
        stop=agreed.stop,
        reports=reports,
        expert_load=load,
    )


def training_objective(
    engine: Engine, microbatches: Sequence[PackedBatch], observe: Callable[[LossInput], None] | None = None
) -> Objective:
    """Return the objective of one step, with the row counts of its global batch. Collective."""
    if engine.experts is not None:
        engine.experts.start_step(microbatches)
    terms = loss_terms(engine.kd, engine.teachers, data_term=engine.data_term, tags=engine.tags)
    counts = count_rows(microbatches, [*terms, *tokens_to_count(terms)], engine.context)
    counts, tokens = counts[: len(terms)], counts[len(terms) :]
    inverse_counts = 1.0 / counts.masked_fill(counts == 0, 1.0).float()  # nothing to divide: the sum is 0
    inverse_counts = with_token_shares(inverse_counts, terms, tokens)
    return Objective(engine.kd, engine.context, terms, inverse_counts, observe)


def count_rows(
    microbatches: Sequence[PackedBatch], terms: Sequence[Term | TagTokens], context: ParallelContext
) -> Tensor:
    """Return the rows of each term in the global batch, fp64 [terms]: numbers of rows, or sums of weights.

    Communication: one all-reduce SUM over data parallelism; no backward.
    """
    counts = [[term.num_rows(batch) for term in terms] for batch in microbatches]
    total = torch.tensor(counts, dtype=torch.float64, device=context.device).sum(dim=0)
    dist.all_reduce(total, group=context.dp_group)
    return total
