"""A run foretold: batch, layouts, stage times, bubble, FLOPs and memory, as the text that a start of a run shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mkd.plan.batch import BatchPlan
from mkd.plan.bubble import StepForecast, balanced_bubble, simulate
from mkd.plan.cost import DOCUMENT_LENGTH, HOST_BYTES_PER_MS, StageTime, pair_cost
from mkd.plan.flops import distillation_flops, matmul_parameters
from mkd.plan.layout import PipelineLayout
from mkd.plan.memory import GIB, MemoryPlan, predict_memory
from mkd.plan.model_shape import ModelShape
from mkd.plan.teachers import Teacher, plan_teachers

PEAK_TFLOPS = 989.0  # bf16 of one H100 or H200 without sparsity: the 1.0 of an MFU


@dataclass(frozen=True)
class Forecast:
    """What one configuration will do on GPUs. Times are of H200s (see `mkd.plan.cost.Rates`), memory of any GPU."""

    config: Any  # mkd.config.schema.Config
    batch: BatchPlan
    student: ModelShape
    teachers: Sequence[ModelShape]  # those that run, in the order of the configuration
    student_layout: PipelineLayout
    teacher_layouts: Sequence[PipelineLayout]
    document_length: int = (
        DOCUMENT_LENGTH  # student tokens of a typical document; longer than a pack: one fills it
    )

    def stage_times(self) -> list[StageTime]:
        """By stage, in model order; with what computing does not hide of the copies of teachers on the host."""
        stages, config = len(self.student_layout.layers), self.config
        cost = pair_cost(config, self.student, self.teachers, stages, self.document_length)
        times = cost.stage_times(self.student_layout, self.teacher_layouts)
        element, tensor = 2 if config.training.bf16 else 4, config.parallel.tensor_model_parallel_size
        planned = zip(
            plan_teachers(config, self.teachers), cost.teacher_forward_ms, self.teacher_layouts, strict=True
        )
        for teacher, forward_ms, layout in planned:
            if teacher.on_host:  # the next layer comes while one computes
                copy_ms = (
                    matmul_parameters(teacher.shape)
                    / teacher.shape.num_layers
                    * element
                    / tensor
                    / HOST_BYTES_PER_MS
                )
                waits = [layers * max(0.0, copy_ms - forward_ms) for layers in layout.layers]
                times = [
                    StageTime(time.forward_ms + wait, time.backward_ms)
                    for time, wait in zip(times, waits, strict=True)
                ]
        return times

    def step(self) -> StepForecast:
        """Of the models alone; `step_ms` has the optimizer's copies too."""
        return simulate(
            self.stage_times(), self.student_layout.pipeline_parallel, self.batch.num_microbatches
        )

    def optimizer_copies_ms(self) -> float:
        """Of an optimizer state on the host: to the device and back, nothing computes meanwhile."""
        training = self.config.training
        if training.optimizer_residency == "device":
            return 0.0
        on_device = replace(
            self, config=replace(self.config, training=replace(training, optimizer_residency="device"))
        )
        return 2 * max(rank.optimizer_gib for rank in on_device.memory().ranks) * GIB / HOST_BYTES_PER_MS

    def step_ms(self) -> float:
        """Predicted time of a step, without communication."""
        return self.step().step_ms + self.optimizer_copies_ms()

    def flops_per_step(self) -> int:
        """Model FLOPs of one optimizer step, all processes together."""
        return self._flops(self.teachers)

    def teacher_share(self) -> float:
        """Proportion (0 to 1) of the step's FLOPs that are forward passes of teachers."""
        return 1 - self._flops(()) / self.flops_per_step()

    def _flops(self, teachers: Sequence[ModelShape]) -> int:
        pack = self.batch.seq_length
        length = min(self.document_length, pack)
        documents = [length] * (pack // length) + [pack % length] * (pack % length > 0)
        of_teachers = [
            [round(one.seq_length / pack * document) for document in documents]
            for one in plan_teachers(self.config, teachers)
        ]
        return self.batch.global_batch_size * distillation_flops(
            self.student, teachers, documents, of_teachers
        )

    def memory(self) -> MemoryPlan:
        return predict_memory(
            self.config, self.student, self.teachers, self.student_layout, self.teacher_layouts, self.batch
        )

    @property
    def num_gpus(self) -> int:
        parallel = self.config.parallel
        ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
        return ranks * parallel.context_parallel_size * self.batch.data_parallel

    def mfu(self, step_ms: float) -> float:
        """Proportion (0 to 1) of the GPUs' bf16 peak that a step of `step_ms` makes of it."""
        return self._peak_ms() / step_ms

    def _peak_ms(self) -> float:
        """Time of a step at MFU 1."""
        return self.flops_per_step() / (self.num_gpus * PEAK_TFLOPS * 1e9)

    def describe(self) -> str:
        """Everything above, a few lines."""
        lines = [self.batch.equation(), f"student layers by stage: {self.student_layout.layers}"]
        for teacher, layout in zip(
            plan_teachers(self.config, self.teachers), self.teacher_layouts, strict=True
        ):
            lines.append(f"{teacher.role} layers by stage: {layout.layers}{self._cross_tokenizer(teacher)}")
        return "\n".join([*lines, *self._padded_attention(), *self._times(), self.memory().describe()])

    def _cross_tokenizer(self, teacher: Teacher) -> str:
        return f"; packs of {teacher.seq_length} tokens of its own" if teacher.is_cross_tokenizer else ""

    def _padded_attention(self) -> list[str]:
        tensor = self.config.parallel.tensor_model_parallel_size
        teachers = [(teacher.role, teacher.shape) for teacher in plan_teachers(self.config, self.teachers)]
        return [
            f"{role} attention: {shape.num_query_groups} key/value heads padded to {shape.padded_query_groups(tensor)} "
            "for tensor parallel"
            for role, shape in [("student", self.student), *teachers]
            if shape.num_query_groups % tensor
        ]

    def _times(self) -> list[str]:
        step, layout, microbatches = self.step(), self.student_layout, self.batch.num_microbatches
        copies_ms = self.optimizer_copies_ms()
        step_ms = step.step_ms + copies_ms
        equal = balanced_bubble(layout.pipeline_parallel, microbatches, layout.virtual_stages)
        by_stage = ", ".join(f"{time.forward_ms:.3g} + {time.backward_ms:.3g}" for time in self.stage_times())
        return [
            f"predicted on H200 in bf16, forward + backward ms of a micro-batch by stage: {by_stage}",
            f"predicted step: {step.step_ms:.4g} ms, {step.ratio:.3f} x the ideal {step.ideal_ms:.4g} ms; "
            f"bubble {step.bubble:.3f} (equal stages {equal:.3f})",
            *(
                [f"with {copies_ms:.4g} ms of the optimizer's copies from and to the host: {step_ms:.4g} ms"]
                * (copies_ms > 0)
            ),
            f"{self.flops_per_step():.3g} FLOPs a step on {self.num_gpus} GPUs: predicted MFU {self.mfu(step_ms):.3f}; "
            f"at MFU 0.5 a step takes {self._peak_ms() / 0.5:.4g} ms",
            *([f"share of the teachers in these FLOPs: {self.teacher_share():.3f}"] if self.teachers else []),
        ]
