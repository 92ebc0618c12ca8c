"""Predict a run before it starts: batch, layouts, stage times, bubble, FLOPs and memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from mkd.config.schema import Config
from mkd.errors import ErrorList, UsageError
from mkd.plan.batch import BatchPlan
from mkd.plan.checks.prefetch_limits import is_auto, states_ahead
from mkd.plan.checks.problems import find_problems
from mkd.plan.facts import RunFacts
from mkd.plan.footprint.memory import GIB, MemoryPlan, RankMemory, predict_memory
from mkd.plan.layout import PipelineLayout
from mkd.plan.models.flops import distillation_flops, forward_flops
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.parameters import active_parameters, model_parameters
from mkd.plan.models.planned_teachers import Teacher
from mkd.plan.serving_side import TeacherSide
from mkd.plan.sides import apart_teachers
from mkd.plan.times.bubble import StepForecast, simulate
from mkd.plan.times.cost import PairCost, with_copies
from mkd.plan.times.hardware import HOST_BYTES_PER_MS, USABLE
from mkd.plan.times.layer_time import WorkTime
from mkd.plan.times.prefetch import PrefetchPlan, RankWork
from mkd.plan.times.prefetch_search import plan_prefetch
from mkd.plan.times.replica_time import replica_ms
from mkd.plan.times.update_time import update_ms

MOST_PLANNED = 4096
"""Pipeline ranks x micro-batches up to which `auto` plans teachers ahead: a few seconds."""
PEAK_TFLOPS = 989.0  # bf16 of one H100 or H200 without sparsity: MFU 1


class PlannedPrefetch(NamedTuple):
    """The plan of teacher forwards ahead."""

    plan: PrefetchPlan
    step_ms: float  # predicted time of the pipeline's part of a step


@dataclass(frozen=True)
class Forecast:
    """Predictions for one configuration: times for H200s (`mkd.plan.times`), memory for any GPU."""

    facts: RunFacts  # of a run without problems, whose models are all known
    gpu_gib: float | None = None  # memory of the GPU of this process, unless the settings give it

    @classmethod
    def from_facts(cls, facts: RunFacts, gpu_gib: float | None = None) -> Forecast:
        """Predict a run. Raises ErrorList with every problem."""
        problems = find_problems(facts)
        if problems:
            raise ErrorList(problems)
        return cls(facts, gpu_gib)

    def with_config(self, config: Config) -> Forecast:
        """Predict the same models on as many GPUs with other settings. Raises ErrorList if they cannot."""
        return self.from_facts(replace(self.facts, config=config), self.gpu_gib)

    @property
    def config(self) -> Config:
        """Settings of the run."""
        return self.facts.config

    @property
    def batch(self) -> BatchPlan:
        """Sizes of one optimizer step."""
        return self.facts.batch

    @property
    def student(self) -> ModelShape:
        """Shape of the student."""
        return self.facts.pair.student

    @property
    def teachers(self) -> tuple[Teacher, ...]:
        """Teachers that run."""
        return self.facts.pair.teachers

    @property
    def student_layout(self) -> PipelineLayout:
        """Pipeline layout of the student."""
        return self.facts.layouts.student

    @cached_property
    def stage_times(self) -> list[WorkTime]:
        """Time of each stage, in model order, plus copies of teachers' layers that nothing hides."""
        return self._cost.stage_times(*self.facts.layouts)

    @cached_property
    def _cost(self) -> PairCost:
        """Cost of a micro-batch, with copies of teachers' layers that nothing hides."""
        cost, element = self.facts.cost, 2 if self.config.training.bf16 else 4
        teachers = zip(self.teachers, cost.teachers, strict=True)
        return replace(cost, teachers=tuple(with_copies(*teacher, element) for teacher in teachers))

    def rank_work(self) -> list[RankWork]:
        """Return the times of each pipeline rank, the teachers' apart. There are no virtual stages."""
        cost = self._cost
        student = replace(cost, teachers=()).stage_times(self.student_layout, ())
        both = cost.stage_times(*self.facts.layouts)
        return [
            RankWork(whole.forward_ms - learned.forward_ms, learned.forward_ms, learned.backward_ms)
            for whole, learned in zip(both, student, strict=True)
        ]

    @cached_property
    def states_ahead(self) -> int:
        """Number of micro-batches that teachers may be ahead.

        `auto` is 0 if the plan would take too long, or is known not to fit the memory.
        """
        ahead = states_ahead(self.config) if self.teachers else 0
        if not ahead or not is_auto(self.config):
            return ahead
        if self.student_layout.pipeline_parallel * self.batch.num_microbatches > MOST_PLANNED:
            return 0
        usable_gib = self.usable_gib()
        return ahead if usable_gib is None or self.need_gib(ahead) <= usable_gib else 0

    def usable_gib(self) -> float | None:
        known = [gib for gib in (self.config.device_memory_gib, self.gpu_gib) if gib is not None]
        return USABLE * min(known) if known else None

    def need_gib(self, ahead: int) -> float:
        """Return the memory of the fullest process with teachers that many micro-batches ahead."""
        return max(rank.total_gib for rank in self._memory(ahead).ranks)

    @cached_property
    def prefetch_search(self) -> tuple[tuple[RankWork, ...], int, int] | None:
        """Arguments of `plan_prefetch`; None if no teacher is ahead."""
        if not self.states_ahead:
            return None
        return tuple(self.rank_work()), self.batch.num_microbatches, self.states_ahead

    @cached_property
    def prefetch(self) -> PlannedPrefetch | None:
        """Plan of the teacher forwards ahead; None if there are none. Takes seconds on many ranks.

        Raises UsageError if no order of work is found, which is not known to happen. `auto` does without
        then, and where none is faster, in a plan that still counts their memory.
        """
        if self.prefetch_search is None:
            return None
        try:
            found = PlannedPrefetch(*plan_prefetch(*self.prefetch_search))
        except UsageError:
            if is_auto(self.config):
                return None
            raise
        return None if is_auto(self.config) and found.step_ms > self.step.step_ms else found

    @property
    def updates(self) -> int:
        """Updates of a step, all with the same completions."""
        return self.facts.work.updates

    @cached_property
    def step(self) -> StepForecast:
        """The pipeline's part of an update; `planned_step_ms` adds the optimizer's."""
        ranks = self.student_layout.pipeline_parallel
        return simulate(self.stage_times, ranks, self.batch.num_microbatches)

    def optimizer_copies_ms(self) -> float:
        """Time to copy an optimizer state on the host to the device and back, while nothing computes."""
        if self.config.training.optimizer_residency == "device":
            return 0.0
        return 2 * max(rank.optimizer_gib for rank in self._with_state) * GIB / HOST_BYTES_PER_MS

    @cached_property
    def optimizer_ms(self) -> float:
        """Time of the optimizer's update, copies of its state included."""
        clips = self.config.optimizer.clip_grad > 0
        teachers = self.config.teachers if self.config.needs_models else ()
        moves = sum(1 / one.ema.every for one in teachers if one.ema is not None)
        of_update = update_ms(self._with_state, self.config.training.bf16, clips, averages=moves)
        return of_update + self.optimizer_copies_ms()

    @cached_property
    def replica_ms(self) -> float:
        """Time of an update that replicas spend on gradients and weights, while nothing computes."""
        student = replace(self._cost, teachers=()).stage_times(self.student_layout, ())
        ranks, nothing = self.student_layout.pipeline_parallel, WorkTime(0.0, 0.0)
        return replica_ms(self.facts, [sum(student[rank::ranks], start=nothing) for rank in range(ranks)])

    @property
    def after_ms(self) -> float:
        """Time of an update beside forwards and backwards."""
        return self.replica_ms + self.optimizer_ms

    @cached_property
    def _with_state(self) -> Sequence[RankMemory]:
        """Memory of every pipeline rank while the optimizer's state is on the device."""
        return predict_memory(self.facts, optimizer_residency="device").ranks

    def step_ms(self) -> float:
        """Predicted time of a step whose teachers are not ahead, with the update.

        To compare settings where `planned_step_ms` would take long. Collectives count, messages between
        stages do not.
        """
        return self._with_sides(self.step.step_ms + self.after_ms)

    def planned_step_ms(self) -> float:
        """Return `step_ms` of a run, whose teachers may be ahead."""
        return self._with_sides(self.pipeline_ms() + self.after_ms)

    def student_step_ms(self) -> float:
        """Return the time of a step if no teacher on processes of its own is late."""
        return self.updates * (self.pipeline_ms() + self.after_ms)

    @cached_property
    def sides(self) -> tuple[TeacherSide, ...]:
        """Teachers on processes of their own."""
        shapes = zip(self.facts.head_numbers, self.facts.heads, strict=True)
        known = [(number, shape) for number, shape in shapes if shape is not None]
        apart = apart_teachers(self.config)
        return tuple(TeacherSide.of(self.facts, number, shape) for number, shape in known if number in apart)

    def _with_sides(self, update_ms: float) -> float:
        """Return the time of a step with such updates, or that of the slowest teacher elsewhere."""
        microbatches = self.batch.num_microbatches * self.batch.data_parallel
        elsewhere_ms = (one.step_ms(microbatches) for one in self.sides)
        return self.updates * max([update_ms, *elsewhere_ms])

    def least_step_ms(self) -> float:
        """Return a bound that `planned_step_ms` never falls below: the slowest rank never waits."""
        ranks, stages = self.student_layout.pipeline_parallel, self.stage_times
        slowest_ms = max(sum(time.total_ms for time in stages[rank::ranks]) for rank in range(ranks))
        return self._with_sides(self.batch.num_microbatches * slowest_ms + self.after_ms)

    def pipeline_ms(self) -> float:
        """Predicted time of forwards and backwards of an update of a run, whose teachers may be ahead."""
        return self.step.step_ms if self.prefetch is None else self.prefetch.step_ms

    def exchange_ms(self) -> float:
        """Predicted time that an average rank spends in a step on the all-to-all of experts."""
        return self._mean_ms(time.exchange_ms for time in self.stage_times)

    def collectives_ms(self) -> float:
        """Predicted time that an average rank waits in a step for tensor and context parallelism."""
        return self._mean_ms(time.collectives_ms for time in self.stage_times)

    def _mean_ms(self, stages_ms: Iterable[float]) -> float:
        """Return the time of an average rank in a step, from the times of a micro-batch on the stages."""
        ranks = self.student_layout.pipeline_parallel
        return self.updates * self.batch.num_microbatches * sum(stages_ms) / ranks

    @cached_property
    def flops_per_step(self) -> float:
        """Model FLOPs of one iteration, all its updates and all processes together."""
        return self._flops(self._all_teachers)

    @property
    def _all_teachers(self) -> list[Teacher]:
        return [*self.teachers, *(side.teacher for side in self.sides)]

    def teacher_share(self) -> float:
        """Proportion (0 to 1) of the step's FLOPs that are forward passes of teachers."""
        return 1 - self._flops(()) / self.flops_per_step

    def _flops(self, teachers: Sequence[Teacher]) -> float:
        pack = self.batch.seq_length
        length = min(self.facts.document_length, pack)
        documents = [length] * (pack // length) + [pack % length] * (pack % length > 0)
        lengths = [[round(one.seq_length / pack * document) for document in documents] for one in teachers]
        packs = self.updates * self.batch.global_batch_size
        total: float = distillation_flops(self.student, (), documents, is_frozen=self.config.lora.is_on)
        for one, own in zip(teachers, lengths, strict=True):
            total += one.share * forward_flops(one.shape, own)
        return packs * total

    @cached_property
    def memory(self) -> MemoryPlan:
        """Memory of every pipeline rank."""
        return self._memory(self.states_ahead)

    @property
    def planned_gib(self) -> float:
        """Memory of the fullest process."""
        return max(rank.total_gib for rank in self.memory.ranks)

    def _memory(self, ahead: int) -> MemoryPlan:
        """Predict the memory with teachers that many micro-batches ahead."""
        return predict_memory(self.facts, ahead)

    @property
    def num_gpus(self) -> int:
        """Number of GPUs, one for each process, those of teachers on processes of their own included."""
        return self.facts.world_size + sum(side.processes for side in self.sides)

    def figures(self) -> dict[str, Any]:
        """Return figures to compare with those of a run, under the names of its metrics, as JSON values.

        `tflops_per_gpu` is of a predicted step, `peak_memory_gib` what torch allocates on the fullest GPU.
        """
        step_ms, exchange_ms = self.planned_step_ms(), self.exchange_ms()
        seconds = step_ms / 1000
        tokens = self.batch.global_batch_size * self.batch.seq_length
        return {
            "num_gpus": self.num_gpus,
            "step_time_ms": step_ms,
            "tokens_per_s_per_gpu": tokens / seconds / self.num_gpus,
            "tflops_per_gpu": self.flops_per_step / seconds / self.num_gpus / 1e12,
            "peak_memory_gib": max(rank.allocated_gib for rank in self.memory.ranks),
            "all_to_all_ms": exchange_ms,
            "all_to_all_share": exchange_ms / step_ms,
            "collectives_ms": self.collectives_ms(),
            "student_parameters": model_parameters(self.student).total,
            "student_active_parameters": active_parameters(self.student),
            "teacher_parameters": [model_parameters(one.shape).total for one in self.teachers],
            "teacher_active_parameters": [active_parameters(one.shape) for one in self.teachers],
        }

    def mfu(self, step_ms: float) -> float:
        """Proportion (0 to 1) of the GPUs' bf16 peak that a step of `step_ms` reaches."""
        return self.flops_per_step / (self.num_gpus * PEAK_TFLOPS * 1e9) / step_ms
