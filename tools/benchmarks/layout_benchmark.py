"""Benchmark one training step in several layouts, each beside what the plan predicts for it.

All layouts train on the same packs, so that their losses are equal up to rounding. Each engine is built,
measured and freed before the next one. Lines are printed as results come, so that a run that is cut short
leaves what it has.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from mkd.data.batch import PackedBatch
from mkd.errors import ErrorList, MkdError
from mkd.parallel.context import ParallelContext
from mkd.plan.advice.cuda_graphs import planned_graphs
from mkd.plan.checks.problems import find_problems
from mkd.plan.forecast import PEAK_TFLOPS
from mkd.plan.models.flops import distillation_flops
from mkd.platform import Platform
from mkd.resolve.run_plan import Plan
from mkd.train.layer_graphs import graph_bytes
from mkd.train.step import Engine, StepResult, train_step
from tools.benchmarks.benchmark_report import Report, Requirement, Skipped, table
from tools.benchmarks.graph_benchmark import graphs_of
from tools.benchmarks.kernel_times import kernel_times
from tools.benchmarks.layout_words import Arm as LayoutArm
from tools.benchmarks.machine import Machine
from tools.benchmarks.measure import Arm, time_arms
from tools.benchmarks.random_engine import PairSettings, parallel_context, random_engine, random_plan
from tools.benchmarks.results import Other
from tools.benchmarks.shapes import shape_of
from tools.benchmarks.synthetic_documents import ChatLengths, document_lengths, for_teachers, full_pack

WARM_UPS = 4  # steps: the optimizer's state, and graphs of bounds that come again
SAME_LOSS = 1e-2  # relative difference that rounding to bf16 explains; another loss is far off
TIMES = ["", "ms", "plan", "ratio", "tokens/s/GPU", "plan", "TFLOP/s/GPU", "MFU", "plan", "graphs", "loss"]
MEMORY = ["GiB of the fullest process", "peak", "plan", "ratio", "reserved", "graphs keep", "plan"]
MEMORY += ["outside torch", "plan"]
GIB = 2**30


@dataclass(frozen=True)
class RankPeak:
    """Memory of one process in its steps, GiB, beside the plan's of its pipeline rank."""

    peak: float
    planned: float
    reserved: float
    graphs: float  # kept by CUDA graphs
    outside: float  # in use on the GPU, and not reserved by torch
    planned_outside: float

    @property
    def held(self) -> float:
        """Memory to compare with the plan's.

        Activations that lie in graphs do not count as allocated while the graphs are replayed, so that only
        what torch has reserved holds them; fragments are in it too.
        """
        return self.reserved if self.graphs else self.peak

    @property
    def ratio(self) -> float:
        return self.held / self.planned


@dataclass(frozen=True)
class Row:
    """The measurements of one layout."""

    ms: float  # of the slowest process
    planned_ms: float
    flops: int  # of all processes, without what is computed again
    tokens: int
    gpus: int
    loss: float  # mean of the first step's tokens
    bounds: tuple[int, int]  # with graphs: of the student, and of the teacher
    planned_graphs_gib: float
    is_rounded: bool  # an FP8 teacher, or no teacher: the loss is another one
    ranks: tuple[RankPeak, ...] = ()  # (): a CPU

    def rate(self, ms: float) -> float:
        """Return the tokens a second and GPU of a step of `ms`."""
        return 1000 * self.tokens / ms / self.gpus

    def mfu(self, ms: float) -> float:
        return self.tflops(ms) / PEAK_TFLOPS

    def tflops(self, ms: float) -> float:
        return self.flops / ms / 1e9 / self.gpus

    @property
    def fullest(self) -> RankPeak:
        return max(self.ranks, key=lambda one: one.held)

    def times(self, name: str) -> list[str]:
        """Return the cells below `TIMES`."""
        ms, planned = self.ms, self.planned_ms
        cells = [name, f"{ms:.1f}", f"{planned:.1f}", f"{ms / planned:.3f}"]
        cells += [f"{self.rate(ms):.0f}", f"{self.rate(planned):.0f}", f"{self.tflops(ms):.3g}"]
        cells += [f"{self.mfu(ms):.3f}", f"{self.mfu(planned):.3f}"]
        return [*cells, "{} and {}".format(*self.bounds), f"{self.loss:.6g}"]

    def memory(self, name: str) -> list[str]:
        """Return the cells below `MEMORY`."""
        one, kept = self.fullest, max(rank.graphs for rank in self.ranks)
        outside = max(rank.outside for rank in self.ranks)
        values = (one.peak, one.planned, one.ratio, one.reserved, kept, self.planned_graphs_gib)
        return [name, *(f"{value:.3f}" for value in (*values, outside, one.planned_outside))]

    def others(self, case: str, name: str) -> list[Other]:
        """Return the figures that are no time."""
        found = [
            Other(case, name, "planned time", "ms", self.planned_ms),
            Other(case, name, "MFU", "", self.mfu(self.ms)),
            Other(case, name, "rate", "tokens/s/GPU", self.rate(self.ms)),
            Other(case, name, "planned rate", "tokens/s/GPU", self.rate(self.planned_ms)),
        ]
        if self.ranks:
            found += [
                Other(case, name, "memory of the largest rank", "GiB", self.fullest.held),
                Other(case, name, "planned memory", "GiB", self.fullest.planned),
                Other(case, name, "memory outside torch", "GiB", max(one.outside for one in self.ranks)),
            ]
        return found


def benchmark(
    machine: Machine,
    platform: Platform,
    settings: PairSettings,  # `num_microbatches` packs of a step, over all processes
    arms: Sequence[LayoutArm],
    lengths: ChatLengths,
    with_profile: bool = False,
) -> Report:
    """Measure the step in each layout; print both tables. Collective."""
    trial = Trial(machine, platform, settings, lengths, with_profile)
    for arm in arms:
        trial.attempt(arm)
        gc.collect()
        if machine.is_cuda:
            torch.cuda.empty_cache()
            left, outside = torch.cuda.memory_allocated() / GIB, outside_torch()
            trial.say(f"{arm.name}: {left:.2f} GiB are left of it, and {outside:.2f} outside torch")
    case = f"{settings.student} <- {settings.teacher}, {settings.num_microbatches} x {settings.seq_length}"
    title = f"layouts {case} tokens, {trial.world_size} processes {' '.join(settings.flags)}".rstrip()
    if trial.speaks and trial.rows:
        print(table(title, TIMES, [row.times(name) for name, row in trial.rows.items()]))
        if machine.is_cuda:
            print(table("memory", MEMORY, [row.memory(name) for name, row in trial.rows.items()]))
        print(flush=True, end="")
    case += f", {trial.world_size} processes"
    others = [one for name, row in trial.rows.items() for one in row.others(case, name)]
    times = {case: {name: row.ms for name, row in trial.rows.items()}}
    return Report(trial.requirements(), [*trial.failed, *wrong_losses(trial.rows)], times, others)


@dataclass
class Trial:
    """Measures one layout after another."""

    machine: Machine
    platform: Platform
    settings: PairSettings
    lengths: ChatLengths
    with_profile: bool
    rows: dict[str, Row] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)  # layouts that do not fit
    failed: list[str] = field(default_factory=list)  # layouts with an error, and it
    start: float = field(default_factory=time.perf_counter)

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def speaks(self) -> bool:
        return not dist.is_initialized() or dist.get_rank() == 0

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start, on rank 0."""
        if self.speaks:
            print(f"[{time.perf_counter() - self.start:4.0f} s] {text}", flush=True)

    def attempt(self, arm: LayoutArm) -> None:
        """Measure a layout. One that fails, on all processes alike, is left out."""
        try:
            self.measure(arm)
        except MkdError:  # the settings
            raise
        except Exception as error:  # of torch, NCCL or Transformer Engine
            if self.speaks:
                traceback.print_exc()
            self.failed.append(f"{arm.name}: {type(error).__name__}: {str(error)[:200]}")
            self.say(self.failed[-1])

    def measure(self, arm: LayoutArm) -> None:
        settings = arm.settings(self.settings, self.world_size)
        with parallel_context(self.platform, settings) as context:
            plan = fitting_plan(settings, self.machine, context)
            if plan is None:
                self.missing.append(arm.name)
                self.say(f"{arm.name}: left out, the plan does not fit this GPU")
                return
            engine, plan = random_engine(settings, self.machine, context)
            self.say(f"built {arm.name}; {planned_graphs(plan.forecast).describe()}")
            self._measure_engine(arm, engine, plan, context)

    def _measure_engine(self, arm: LayoutArm, engine: Engine, plan: Plan, context: ParallelContext) -> None:
        packs = self._packs()
        mine = for_teachers(
            [pack.to(context.device) for pack in packs[context.dp_rank :: context.dp_size]],
            len(engine.teachers),
        )

        def step() -> StepResult:
            return train_step(engine, mine, following=mine)

        first = step()
        for _ in range(WARM_UPS - 1):
            step()
        ranks = self._memory(step, engine, plan, context)
        device, rounds = self.machine.device, self.machine.rounds
        ms = time_arms([Arm(arm.name, step)], device, rounds, warmup=1)[arm.name]
        if self.with_profile:
            self._profile(arm.name, step, ms)
        train_step(engine, mine)  # nothing is ahead afterwards
        graphs = [graphs_of(engine, *which) for which in ((False, True), (True, False))]
        self.rows[arm.name] = row = Row(
            ms,
            plan.forecast.planned_step_ms(),
            distillation_flops(
                plan.student.shape, [one.shape for one in plan.teachers], document_lengths(packs)
            ),
            self.settings.num_microbatches * self.settings.seq_length,
            context.world_size,
            first.sums.token_sums()["loss"] / first.sums.num_loss_tokens,
            tuple(max((len(one.bounds) for one, wanted in found if wanted), default=0) for found in graphs),
            planned_graphs(plan.forecast).kept_gib,
            arm.changes_loss,
            ranks,
        )
        self.say("  ".join(map(" ".join, zip(TIMES, row.times(arm.name), strict=True))))
        if ranks:
            self.say("  ".join(map(" ".join, zip(MEMORY, row.memory(arm.name), strict=True))))

    def _packs(self) -> list[PackedBatch]:
        """Return the packs of the step, the same on every process and in every layout."""
        random = np.random.default_rng(self.machine.seed)
        vocab = min(shape_of(name).vocab_size for name in (self.settings.student, self.settings.teacher))
        count = range(self.settings.num_microbatches)
        return [full_pack(self.settings.seq_length, vocab, self.lengths, random) for _ in count]

    def _memory(
        self, step: Callable[[], object], engine: Engine, plan: Plan, context: ParallelContext
    ) -> tuple[RankPeak, ...]:
        """Return what every process holds in a step. Collective."""
        if not self.machine.is_cuda:
            step()
            return ()
        torch.cuda.reset_peak_memory_stats()
        step()
        planned = plan.forecast.memory.ranks[context.pp_rank]
        mine = RankPeak(
            torch.cuda.max_memory_allocated() / GIB,
            planned.allocated_gib,
            torch.cuda.memory_reserved() / GIB,
            graph_bytes(engine.stages) / GIB,
            outside_torch(),
            planned.device_gib,
        )
        every: list = [None] * context.world_size
        dist.all_gather_object(every, mine)
        return tuple(every)

    def _profile(self, name: str, step: Callable[[], object], ms: float) -> None:
        kernels = kernel_times(step, self.machine.is_cuda)
        kinds = sorted(kernels.by_kind.items(), key=lambda item: -item[1])
        by_kind = ", ".join(f"{kind} {spent:.1f}" for kind, spent in kinds)
        self.say(f"{name}: kernels run in {kernels.busy_ms / ms:.2f} of the step; ms by kind: {by_kind}")

    def requirements(self) -> list[Requirement | Skipped]:
        """Return a line for the memory of each layout."""
        lines: list[Requirement | Skipped] = [
            Skipped("R20", f"{name}: its plan does not fit this GPU") for name in self.missing
        ]
        if not self.machine.is_cuda:
            return [*lines, Skipped("R20", "memory against the plan: measured on GPUs only")]
        for name, row in self.rows.items():
            deviation = max(abs(one.ratio - 1) for one in row.ranks)
            what = f"{name}: of the plan's memory, the process furthest off"
            lines.append(Requirement("R20", deviation, what, "<=", 0.05))
        return lines


def outside_torch() -> float:
    """Return the GiB in use on this process's GPU that torch has not reserved: CUDA's context, NCCL."""
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) / GIB


def fitting_plan(settings: PairSettings, machine: Machine, context: ParallelContext) -> Plan | None:
    """Return the plan, or None if it does not fit the GPU. Raises ErrorList if it cannot run."""
    plan = random_plan(settings, machine, context)
    # The packs come from the benchmark.
    problems = [one for one in find_problems(plan.facts) if one.code != "data-path-missing"]
    if problems:
        raise ErrorList(problems)
    if machine.is_cuda and plan.forecast.planned_gib > plan.forecast.usable_gib():
        return None
    return plan


def wrong_losses(rows: dict[str, Row]) -> list[str]:
    """Return the layouts whose first loss is not that of the first one with the same models."""
    exact = {name: row.loss for name, row in rows.items() if not row.is_rounded}
    first = next(iter(exact.values()), 0.0)
    return [
        f"{name}: loss {loss}, that of the first layout {first}"
        for name, loss in exact.items()
        if not abs(loss - first) <= SAME_LOSS * abs(first)
    ]
