"""The pipeline bubble, the time that ranks wait in a step.

A formula gives it for equal stages, a simulation for any stages. The simulation runs every rank's work in
Megatron's order. A task starts when its rank is free and its input has been computed. Messages take no time,
and the update after the last backward is not included. Only the beginning of a long step is simulated. Once
the pipeline is full, each further micro-batch adds the time of the slowest rank, or of ranks that wait for
each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mkd.plan.times.layer_time import WorkTime

SIMULATED = 32  # micro-batches per pipeline rank


class Task(NamedTuple):
    """The forward or backward of one micro-batch through one virtual stage of a pipeline rank."""

    is_forward: bool
    microbatch: int
    virtual_stage: int


@dataclass(frozen=True)
class StepForecast:
    """Predicted time of all micro-batches of one optimizer step."""

    step_ms: float
    ideal_ms: float  # the same work spread evenly over all ranks, without waiting

    @property
    def bubble(self) -> float:
        """Proportion of the step (0 to 1) that an average rank waits, unequal stages included."""
        return max(0.0, 1 - self.ideal_ms / self.step_ms)

    @property
    def ratio(self) -> float:
        """Step time over ideal time."""
        return self.step_ms / self.ideal_ms


def balanced_bubble(pipeline_parallel: int, num_microbatches: int, virtual_stages: int = 1) -> float:
    """Return the bubble (0 to 1) of equal stages, (p - 1) / (v m + p - 1).

    Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2. For v > 1 it holds if m is a multiple of p,
    which the interleaved schedule requires anyway.
    """
    waits = pipeline_parallel - 1
    return waits / (virtual_stages * num_microbatches + waits)


def rank_order(
    pipeline_rank: int, pipeline_parallel: int, virtual_stages: int, num_microbatches: int
) -> list[Task]:
    """Return what Megatron's schedules run on one rank.

    Forwards fill the pipeline, then one forward and one backward alternate, then the remaining backwards
    follow. With interleaving, micro-batches go through the virtual stages in groups of `pipeline_parallel`;
    backward takes the virtual stages from the last to the first.
    """
    groups = range(0, num_microbatches, pipeline_parallel if virtual_stages > 1 else num_microbatches)
    forwards = [
        (microbatch, part)
        for first in groups
        for part in range(virtual_stages)
        for microbatch in range(first, min(first + groups.step, num_microbatches))
    ]
    distance = pipeline_parallel - pipeline_rank - 1
    warmup = distance if virtual_stages == 1 else 2 * distance + (virtual_stages - 1) * pipeline_parallel
    warmup = min(warmup, len(forwards))
    tasks = [Task(True, *forward) for forward in forwards[:warmup]]
    backwards = [Task(False, microbatch, virtual_stages - 1 - part) for microbatch, part in forwards]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        tasks += [Task(True, *forward), backward]
    return tasks + backwards[len(forwards) - warmup :]


def simulate(stages: Sequence[WorkTime], pipeline_parallel: int, num_microbatches: int) -> StepForecast:
    """Simulate one step over `stages` (in model order, a multiple of `pipeline_parallel`).

    Beyond `SIMULATED` micro-batches per rank, each further one takes the average time of those in the second
    half. If the slowest rank needs longer for it, that time counts.
    """
    simulated = SIMULATED * pipeline_parallel
    if num_microbatches <= simulated:
        step_ms = makespan_ms(stages, pipeline_parallel, num_microbatches)
    else:
        half_ms = makespan_ms(stages, pipeline_parallel, simulated // 2)
        whole_ms = makespan_ms(stages, pipeline_parallel, simulated)
        by_rank = (stages[rank::pipeline_parallel] for rank in range(pipeline_parallel))
        slowest_ms = max(sum(stage.total_ms for stage in of_rank) for of_rank in by_rank)
        each_ms = max(slowest_ms, (whole_ms - half_ms) / (simulated - simulated // 2))
        step_ms = whole_ms + each_ms * (num_microbatches - simulated)
    work_ms = num_microbatches * sum(stage.total_ms for stage in stages)
    return StepForecast(step_ms=step_ms, ideal_ms=work_ms / pipeline_parallel)


def makespan_ms(stages: Sequence[WorkTime], pipeline_parallel: int, num_microbatches: int) -> float:
    """Return the milliseconds until all ranks have done all their tasks."""
    virtual_stages = len(stages) // pipeline_parallel
    ranks = range(pipeline_parallel)
    orders = [rank_order(rank, pipeline_parallel, virtual_stages, num_microbatches) for rank in ranks]
    position, clock_ms = [0] * pipeline_parallel, [0.0] * pipeline_parallel
    done_ms: dict[tuple[bool, int, int], float] = {}  # by (is_forward, micro-batch, stage)
    while any(position[rank] < len(order) for rank, order in enumerate(orders)):
        before = list(position)
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                task = order[position[rank]]
                stage = task.virtual_stage * pipeline_parallel + rank
                source = _input(task, stage, len(stages))
                if source is not None and source not in done_ms:
                    break
                took_ms = stages[stage].forward_ms if task.is_forward else stages[stage].backward_ms
                ready_ms = 0.0 if source is None else done_ms[source]
                clock_ms[rank] = max(clock_ms[rank], ready_ms) + took_ms
                done_ms[(task.is_forward, task.microbatch, stage)] = clock_ms[rank]
                position[rank] += 1
        assert position != before, "the schedule waits for itself"
    return max(clock_ms)


def _input(task: Task, stage: int, num_stages: int) -> tuple[bool, int, int] | None:
    """Return the task that must be done first: in a neighbouring stage, or the task's own forward."""
    if task.is_forward:
        return (True, task.microbatch, stage - 1) if stage else None
    if stage == num_stages - 1:
        return (True, task.microbatch, stage)
    return (False, task.microbatch, stage + 1)
