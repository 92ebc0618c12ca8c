"""Turn step results into metrics records and progress lines. Only global rank 0 writes.

The losses of a log interval are means over the rows of all its steps: their sums are added up and divided
once. A mean of step means would break `kd_loss == sum of teacher_weight * kd_loss/<teacher>`, because
teachers are compared on different rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mkd.checkpoint.folders import TrainingPosition
from mkd.data.batch import PackedBatch
from mkd.log.metrics import IntervalAverager, Registry
from mkd.log.progress import Lines
from mkd.log.writers import MetricLogger
from mkd.parallel.context import ParallelContext
from mkd.plan.models.flops import distillation_flops
from mkd.plan.models.model_shape import ModelShape
from mkd.train.step import StepResult
from mkd.train.sums import LossSums

_TEACHER_KEYS = ("teacher_ce", "teacher_entropy", "top1_agreement")
NO_FIGURES: Mapping[str, float] = {}
_LOSS_KEYS = {"loss": "loss", "ce": "ce_loss", "kd": "kd_loss"} | {name: name for name in _TEACHER_KEYS}
"""Sum (see `LossSums.token_sums`) -> metric key."""


@dataclass(frozen=True)
class Interval:
    """The steps of a log interval since this start: what was measured in earlier ones is unknown."""

    steps: int  # 0 if the sampling server is lost in the first one
    timed_ms: float


Figures = Mapping[str, Callable[[Interval], float | None]]
"""Metric -> what returns its value for an interval that has ended; None: it is absent. Collective."""


@dataclass
class Reporter:
    """Averages the steps of a log interval and sends them to the writers and the terminal."""

    context: ParallelContext
    logger: MetricLogger
    student: ModelShape
    teachers: Mapping[int, ModelShape]  # the teachers that run, by their numbers
    kd_ratio: float
    log_interval: int
    lines: Lines  # of the terminal
    metrics: Registry
    global_batch_size: int
    seq_length: int
    has_own_rows: bool = False  # some teacher reads another row of tokens than the student
    teachers_move: bool = False  # the weights of some teacher follow the student's
    initial_kd: float | None = None  # held-out kd_loss before the first step, if it was evaluated
    updates: int = 1  # of every step
    is_frozen: bool = False  # the student's weights, beside its adapters
    of_interval: Figures = field(default_factory=dict)  # metrics beside those of single steps
    interval: IntervalAverager = field(init=False)  # metrics other than the losses
    _losses: LossSums | None = None  # of the interval's steps with an update
    _steps: int = 0  # steps of the interval
    _untimed_steps: int = 0  # of these before this start, whose teachers' time and waits are unknown, ...
    _untimed_ms: float = 0.0  # ... and the time of these

    def __post_init__(self) -> None:
        self.interval = IntervalAverager(self.metrics)

    def train(
        self,
        position: TrainingPosition,
        result: StepResult,
        microbatches: Sequence[PackedBatch],
        is_spike: bool = False,
        step_packs: int | None = None,  # default: `global_batch_size`
        figures: Mapping[str, float] = NO_FIGURES,  # more metrics of the step
    ) -> None:
        """Add one step. At the end of a log interval, write its record and print its line.

        `microbatches` are those of this rank, on the CPU: reading their lengths must not wait for the device.
        A step without an update adds only its time and its position.
        """
        seconds, packs = result.step_time_ms / 1000, step_packs or self.global_batch_size
        ranks_per_replica = self.context.sizes.replica
        if result.is_applied:
            earlier = self._losses and self._losses.named_as(result.sums)
            self._losses = earlier + result.sums if earlier else result.sums
        self.interval.add(
            {"num_loss_tokens": 0},
            iteration=position.iteration,
            consumed_samples=position.consumed_samples,
            consumed_tokens=position.consumed_tokens,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            step_time_ms=result.step_time_ms,
            tokens_per_s_per_gpu=packs * self.seq_length / seconds / self.context.world_size,
            tflops_per_gpu=self.updates * self._flops(microbatches) / seconds / 1e12 / ranks_per_replica,
            skipped_iterations=int(not result.is_applied),
            **{**result.expert_load, **({"loss_spikes": 1} if is_spike else {}), **figures},
        )
        self._steps += 1
        if position.iteration % self.log_interval == 0:
            self.flush()

    def flush(self) -> None:
        """Write the record and print the line of the steps since the last one, if there are any."""
        if not self._steps:
            return
        if self._losses:
            sums = self._losses
            with_ce = self.kd_ratio < 1
            self.interval.add(self._computed(sums, with_ce), self._per_teacher(sums, with_ce))
        record = self.interval.flush()
        timed_ms = record["step_time_ms"] * self._steps - self._untimed_ms
        interval = Interval(self._steps - self._untimed_steps, timed_ms)
        values = {name: take(interval) for name, take in self.of_interval.items()}
        record |= {name: value for name, value in values.items() if value is not None}
        self._losses, self._steps, self._untimed_steps, self._untimed_ms = None, 0, 0, 0.0
        self._write({"teacher_share": math.nan} | record, self.lines.train(record))

    @property
    def open_interval(self) -> dict[str, Any]:
        """The steps since the last record, for a checkpoint; {} if there are none."""
        if not self._steps:
            return {}
        losses = [asdict(self._losses)] if self._losses else []
        return {"steps": self._steps, "sums": self.interval.state, "losses": losses}

    def go_on(self, open_interval: Mapping[str, Any]) -> None:
        """Continue the interval that was open when a checkpoint was saved.

        Earlier versions saved the losses among the sums, each already divided by its rows in its step. Such
        an interval is averaged as it was then.
        """
        if open_interval:
            self._steps = self._untimed_steps = open_interval["steps"]
            self.interval.restore(open_interval["sums"])
            self._losses = next(map(LossSums.from_state, open_interval.get("losses", ())), None)
            self._untimed_ms = open_interval["sums"]["step_time_ms"][0]

    def valid(self, position: TrainingPosition, sums: LossSums) -> None:
        """Write and print one evaluation of the held-out set."""
        averager = IntervalAverager(self.metrics)
        averager.add(
            self._computed(sums, with_ce=True),
            self._per_teacher(sums, with_ce=True),
            iteration=position.iteration,
            consumed_samples=position.consumed_samples,
            consumed_tokens=position.consumed_tokens,
        )
        record = averager.flush()
        record |= self._gap_closed(record)
        self._write({**record, "split": "valid"}, self.lines.valid(record))

    def close(self) -> None:
        self.logger.close()

    def _write(self, record: dict[str, Any], line: str) -> None:
        """Write the record, with null for losses that this run does not compute, and print the line."""
        absent = {key: math.nan for key in _LOSS_KEYS.values() if key not in record}
        self.logger.write(record | absent)
        if self.context.rank == 0:
            print(line, flush=True)

    def _computed(self, sums: LossSums, with_ce: bool) -> dict[str, float]:
        """Return the sums by metric key, without those that this run does not compute."""
        absent = set() if self.kd_ratio > 0 else {"kd", *_TEACHER_KEYS}
        has_ce = sums.feedback is None or sums.has_cross_entropy
        absent |= set() if with_ce and has_ce else {"ce"}
        present = ((name, value) for name, value in sums.token_sums().items() if name not in absent)
        return {_LOSS_KEYS.get(name, name): value for name, value in present}

    def _gap_closed(self, record: Mapping[str, float]) -> dict[str, float]:
        """Return `gap_closed`; nothing if there is no gap of frozen teachers, or its beginning is unknown."""
        if record["iteration"] == 0:
            self.initial_kd = record.get("kd_loss")
        if self.teachers_move or not self.initial_kd or "kd_loss" not in record:
            return {}
        return {"gap_closed": 1 - record["kd_loss"] / self.initial_kd}

    def _per_teacher(self, sums: LossSums, with_ce: bool) -> dict[str, tuple[float, float]]:
        """Return the metrics of teachers, if there are several or one is compared on chunks, and of tags."""
        if not (len(sums.teachers) > 1 or self.has_own_rows):
            return {}
        return sums.per_teacher() | sums.per_tag(with_ce)

    def _flops(self, microbatches: Sequence[PackedBatch]) -> int:
        """Return the floating-point operations of all models on this rank's micro-batches."""

        def lengths(rows) -> list[int]:
            return [n for row in rows for n in row.cu_seqlens.diff().tolist()]

        of_teachers = [
            [
                row
                for batch in microbatches
                if batch.needs_teacher(number)
                for row in batch.teacher_inputs[number].token_rows(batch)
            ]
            for number in self.teachers
        ]
        teacher_lengths = [lengths(rows) for rows in of_teachers]
        models = self.student, tuple(self.teachers.values())
        return distillation_flops(*models, lengths(microbatches), teacher_lengths, self.is_frozen)


def peak_memory_gib(context: ParallelContext, graph_bytes: int) -> float | None:
    """Return the peak memory of the fullest GPU; None on CPUs, where torch does not count memory.

    Torch does not count what CUDA graphs keep, so that is added. Communication: one all-reduce MAX.
    """
    if not context.platform.is_cuda:
        return None
    peak = torch.tensor((torch.cuda.max_memory_allocated() + graph_bytes) / 2**30, device=context.device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return peak.item()
