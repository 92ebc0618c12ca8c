"""Benchmark the step of a student with experts, beside the teacher's forward and Megatron's own SFT step.

Each engine is built, measured and freed before the next one: the optimizers of several students do not fit
one GPU together. Lines are printed as results come, so that a run that is cut short leaves what it has.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist

from mkd.data.batch import PackedBatch
from mkd.parallel.context import ParallelContext
from mkd.plan.footprint.memory import RankMemory, predict_memory
from mkd.plan.forecast import PEAK_TFLOPS
from mkd.plan.models.flops import distillation_flops, forward_flops
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.parameters import active_parameters, model_parameters
from mkd.platform import Platform
from mkd.resolve.run_plan import Plan
from tools.benchmarks.benchmark_report import Report, Requirement, Skipped, table
from tools.benchmarks.kernel_times import ALL_TO_ALL, KernelTimes, kernel_times
from tools.benchmarks.machine import Machine
from tools.benchmarks.measure import Arm, time_arms
from tools.benchmarks.megatron_sft import build_sft_step
from tools.benchmarks.random_engine import PairSettings, parallel_context, random_engine, random_plan
from tools.benchmarks.shapes import config_of, shape_of
from tools.benchmarks.step_benchmark import step_of, teacher_forward
from tools.benchmarks.synthetic_documents import ChatLengths, document_lengths, full_pack

MKD, MEGATRON = "SFT step, mkd", "SFT step, Megatron"
HEADER = ["", "ms", "tokens/s/GPU", "MFU", "GiB", "planned", "ratio", ALL_TO_ALL]
SAME_LOSS = 1e-3  # relative difference that rounding explains
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    ms: float  # of the slowest rank
    flops: int  # of this rank's packs, by active parameters
    tokens: int  # of this rank
    memory: tuple[float, float | None] | None = None  # GiB: peak of all ranks, and the plan's; None: unknown
    kernels: KernelTimes | None = None  # of this rank
    loss: float | None = None  # mean of the tokens, of an SFT step

    def cells(self, name: str) -> list[str]:
        """Return the cells below `HEADER`."""
        cells = [name, f"{self.ms:.1f}", f"{1000 * self.tokens / self.ms:.0f}", f"{self.mfu:.3f}"]
        peak, planned = self.memory or (None, None)
        cells += ["-" if gib is None else f"{gib:.2f}" for gib in (peak, planned)]
        cells.append("-" if self.memory_ratio is None else f"{self.memory_ratio:.3f}")
        return [*cells, "-" if self.kernels is None else f"{self._share(self.kernels):.3f}"]

    @property
    def mfu(self) -> float:
        return self.flops / self.ms / 1e9 / PEAK_TFLOPS

    @property
    def memory_ratio(self) -> float | None:
        peak, planned = self.memory or (None, None)
        return None if peak is None or planned is None else peak / planned

    def _share(self, kernels: KernelTimes) -> float:
        return kernels.by_kind.get(ALL_TO_ALL, 0.0) / self.ms


def benchmark(
    machine: Machine,
    platform: Platform,
    settings: PairSettings,  # each of `teachers` takes the place of its teacher
    teachers: Sequence[str],
    lengths: ChatLengths,
    memory_fraction: float | None = None,  # of the GPU that the plan may fill; None: the student is as given
    num_kernels: int = 0,  # kernels to list
) -> Report:
    """Measure a step with each teacher, its parts and Megatron's SFT step; print the table. Collective."""
    with parallel_context(platform, settings) as context:
        if memory_fraction is not None:
            settings = with_most_layers(settings, teachers, machine, context, memory_fraction)
        trial = Trial(machine, context, settings, lengths, num_kernels)
        trial.say(_describe(settings, teachers))
        for teacher in teachers:
            trial.attempt(trial.distil, teacher)
        trial.attempt(trial.train_alone)
        trial.attempt(trial.train_with_megatron)  # last: its dispatchers keep the memory of a graph
        title = f"experts {settings.student}, {context.world_size} processes, "
        title += f"{settings.num_microbatches} x {settings.tokens_per_microbatch} tokens each"
        if context.rank == 0:
            cells = [row.cells(name) for name, row in trial.rows.items()]
            print(table(title, HEADER, cells), flush=True)
        times = {title: {name: row.ms for name, row in trial.rows.items()}}
        wrong = _wrong(trial.rows, shape_of(settings.student))
        return Report(_requirements(machine, trial.rows, teachers), wrong, times)


def _names(teacher: str) -> tuple[str, str]:
    """Return the names of the rows of a teacher: of the step, and of its forward alone."""
    return f"KD step <- {teacher}", f"forward of {teacher}"


@dataclass
class Trial:
    """Measures one engine after another."""

    machine: Machine
    context: ParallelContext
    settings: PairSettings
    lengths: ChatLengths
    num_kernels: int
    rows: dict[str, Row] = field(default_factory=dict)
    start: float = field(default_factory=time.perf_counter)

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start, on rank 0."""
        if self.context.rank == 0:
            print(f"[{time.perf_counter() - self.start:4.0f} s] {text}", flush=True)

    def attempt(self, measure: Callable[..., None], *args: str) -> None:
        """Measure, free the engine, and say what is left of it. An engine that does not fit is left out."""
        what = " ".join((measure.__name__, *args))
        try:
            measure(*args)
        except torch.cuda.OutOfMemoryError as error:
            self.say(f"{what}: {str(error).splitlines()[0]}")
        gc.collect()
        if self.machine.is_cuda:
            torch.cuda.empty_cache()
            self.say(f"{what}: {torch.cuda.memory_allocated() / GIB:.2f} GiB are left of it")

    def distil(self, teacher: str) -> None:
        settings = replace(self.settings, teacher=teacher)
        engine, plan = random_engine(settings, self.machine, self.context)
        self.say(f"built {settings.student} <- {teacher}")
        batches = self._batches(plan)
        step, forward = step_of(engine, batches), teacher_forward(engine, batches)
        name, of_teacher = _names(teacher)
        memory = self._memory(step, plan)
        times = time_arms([Arm(name, step), Arm(of_teacher, forward)], *self._rounds)
        student, lengths = plan.student.shape, document_lengths(batches)
        shape = plan.teachers[0].shape
        flops = distillation_flops(student, [shape], lengths)
        self._add(name, times[name], flops, memory, self._profile(name, step))
        self._add(of_teacher, times[of_teacher], forward_flops(shape, lengths))

    def train_alone(self) -> None:
        settings = replace(self.settings, kd_ratio=0.0)
        engine, plan = random_engine(settings, self.machine, self.context)
        self.say(f"built {settings.student} alone")
        batches = self._batches(plan)
        self._add_sft(MKD, step_of(engine, batches), plan, batches)

    def train_with_megatron(self) -> None:
        plan = random_plan(replace(self.settings, kd_ratio=0.0), self.machine, self.context)
        batches = self._batches(plan)
        step = build_sft_step(plan, self.context, batches)
        self.say(f"built Megatron's {self.settings.student}")
        self._add_sft(MEGATRON, step, plan, batches, is_planned=False)

    def _add_sft(
        self,
        name: str,
        step: Callable[[], object],
        plan: Plan,
        batches: list[PackedBatch],
        is_planned: bool = True,
    ) -> None:
        memory = self._memory(step, plan, is_planned)
        times = time_arms([Arm(name, step)], *self._rounds)
        flops = distillation_flops(plan.student.shape, [], document_lengths(batches))
        kernels, loss = self._profile(name, step), _mean_loss(step())
        self.say(f"{name}: mean loss {loss:.5f}")
        self._add(name, times[name], flops, memory, kernels, loss)

    @property
    def _rounds(self) -> tuple[torch.device, int, int]:
        return self.machine.device, self.machine.rounds, 1

    def _batches(self, plan: Plan) -> list[PackedBatch]:
        """Return this rank's micro-batches: the same for every engine."""
        random = np.random.default_rng(self.machine.seed + self.context.dp_rank)
        vocab = min(source.shape.vocab_size for source in (plan.student, *plan.teachers))
        tokens, device = self.settings.tokens_per_microbatch, self.context.device
        count = range(self.settings.num_microbatches)
        return [full_pack(tokens, vocab, self.lengths, random).to(device) for _ in count]

    def _memory(
        self, step: Callable[[], object], plan: Plan, is_planned: bool = True
    ) -> tuple[float, float | None] | None:
        """Return the peak over two steps and the plan's, GiB. The first creates the optimizer's state."""
        if not self.machine.is_cuda:
            step()
            return None
        torch.cuda.reset_peak_memory_stats()
        step()
        self.say("made the first step")
        step()
        peak = torch.tensor(torch.cuda.max_memory_allocated() / GIB, device=self.context.device)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        planned = planned_memory(plan)
        self.say(f"plan: {planned.describe()}")
        return peak.item(), planned.allocated_gib if is_planned else None

    def _profile(self, name: str, step: Callable[[], object]) -> KernelTimes:
        kernels = kernel_times(step, self.machine.is_cuda)
        kinds = sorted(kernels.by_kind.items(), key=lambda item: -item[1])
        self.say(f"{name}, ms by kind: " + ", ".join(f"{kind} {ms:.1f}" for kind, ms in kinds))
        for kernel, (ms, calls) in list(kernels.by_name.items())[: self.num_kernels]:
            self.say(f"  {ms:8.2f} ms {calls:6d} x {kernel[:90]}")
        return kernels

    def _add(
        self,
        name: str,
        ms: float,
        flops: int,
        memory: tuple[float, float | None] | None = None,
        kernels: KernelTimes | None = None,
        loss: float | None = None,
    ) -> None:
        tokens = self.settings.num_microbatches * self.settings.tokens_per_microbatch
        self.rows[name] = Row(ms, flops, tokens, memory, kernels, loss)
        cells = zip(HEADER, self.rows[name].cells(name), strict=True)
        self.say("  ".join(f"{head} {cell}" for head, cell in cells))


def _mean_loss(result: object) -> float:
    """Return the mean loss of a step of mkd or of Megatron."""
    if isinstance(result, float):
        return result
    return result.sums.token_sums()["loss"] / result.sums.num_loss_tokens


def planned_memory(plan: Plan) -> RankMemory:
    """Return the plan's memory of a process without a pipeline."""
    return predict_memory(plan.facts).ranks[0]


def with_most_layers(
    settings: PairSettings,
    teachers: Sequence[str],
    machine: Machine,
    context: ParallelContext,
    memory_fraction: float,
) -> PairSettings:
    """Return the settings with as many layers of the student as fit beside each of the teachers."""
    assert machine.is_cuda, "a CPU has no memory to fill"
    limit = memory_fraction * torch.cuda.get_device_properties(context.device).total_memory / GIB
    most = config_of(settings.student)["num_hidden_layers"]
    for layers in range(most, 1, -1):
        found = replace(settings, student=f"{settings.student}:{layers}")
        plans = (random_plan(replace(found, teacher=name), machine, context) for name in teachers)
        if all(planned_memory(plan).total_gib <= limit for plan in plans):
            return found
    return replace(settings, student=f"{settings.student}:1")


def _describe(settings: PairSettings, teachers: Sequence[str]) -> str:
    """Return the parameters of all models: total, and active ones of a token."""
    models = []
    for name in (settings.student, *teachers):
        shape = shape_of(name)
        total, active = model_parameters(shape).total, active_parameters(shape)
        models.append(f"{name} {total / 1e9:.2f}B ({active / 1e9:.2f}B active)")
    return ", ".join(models)


def _wrong(rows: dict[str, Row], student: ModelShape) -> list[str]:
    """Return mkd's SFT step if its loss is not Megatron's, which counts the vocabulary's padding too."""
    losses = [rows[name].loss for name in (MKD, MEGATRON) if name in rows]
    if len(losses) < 2 or student.padded_vocab_size(1) != student.vocab_size:
        return []
    mine, theirs = losses
    return [f"{MKD}: loss {mine}, Megatron's {theirs}"] if abs(mine / theirs - 1) > SAME_LOSS else []


def _requirements(
    machine: Machine, rows: dict[str, Row], teachers: Sequence[str]
) -> list[Requirement | Skipped]:
    lines: list[Requirement | Skipped] = []
    for name, of_teacher in map(_names, teachers):
        for sft in (MEGATRON, MKD):
            what = f"{name}: of {of_teacher} + {sft}"
            if {name, of_teacher, sft} <= rows.keys():
                ratio = rows[name].ms / (rows[of_teacher].ms + rows[sft].ms)
                lines.append(Requirement("R10", ratio, what, "<=", 1.05))
            else:
                lines.append(Skipped("R10", f"{what}: a part did not fit"))
    for name, row in rows.items():
        if row.memory_ratio is not None:
            deviation = abs(row.memory_ratio - 1)
            what = f"{name}: of the plan's memory, either way"
            lines.append(Requirement("R20", deviation, what, "<=", 0.05))
    if not machine.is_cuda:
        lines.append(Skipped("R20", "memory against the plan: measured on GPUs only"))
    return lines
