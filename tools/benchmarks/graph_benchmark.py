"""Benchmark CUDA graphs: a step without, with those of the teacher, and with those of both models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model

from mkd.models.graphs.graphed_decoder import GraphedDecoder
from mkd.platform import Platform
from mkd.train.layer_graphs import graph_layers
from mkd.train.step import Engine, StepResult, train_step
from tools.benchmarks.benchmark_report import Report, Requirement, Skipped, table
from tools.benchmarks.kernel_times import kernel_times
from tools.benchmarks.machine import Machine
from tools.benchmarks.measure import Arm, time_arms
from tools.benchmarks.random_engine import PairSettings, parallel_context, random_engine
from tools.benchmarks.synthetic_documents import ChatLengths, for_teachers, full_pack

EAGER, TEACHER, BOTH = "without graphs", "teacher", "teacher and student"
WARM_UPS = 4  # steps: bounds get their graphs when they come again
GIB = 2**30


@dataclass(frozen=True)
class Forced:
    """Graphs that a run does not make by itself; see `graph_layers`."""

    cuts_at_experts: bool = False
    most_layers: int | None = None


@dataclass
class Step:
    """The step of one arm: the same engine, with graphs switched on for some of its models."""

    engine: Engine
    run: Callable[[], StepResult]
    teacher: bool
    student: bool
    result: StepResult | None = None

    def __call__(self) -> None:
        for graphs, wanted in graphs_of(self.engine, self.teacher, self.student):
            graphs.is_on = wanted
        self.result = self.run()
        for graphs, wanted in graphs_of(self.engine, self.teacher, self.student):
            assert graphs.is_on == wanted, f"{graphs.name}: no graph could be made"

    def figures(self) -> dict[str, float]:
        """Return the loss and the gradient's norm of the last call."""
        assert self.result is not None
        return {"loss": float(self.result.sums.token_sums()["loss"]), "norm": self.result.grad_norm}


def graphs_of(engine: Engine, teacher: bool, student: bool) -> list[tuple[GraphedDecoder, bool]]:
    """Return the graphs of all parts of this rank, and whether they are wanted."""
    found = []
    for wrapped in engine.stages:
        stage = get_attr_wrapped_model(wrapped, "teachers", return_model_obj=True)
        found += [(stage.student.graphs, student), *((one.graphs, teacher) for one in stage.teachers)]
    return [(graphs, wanted) for graphs, wanted in found if graphs is not None]


def benchmark(
    machine: Machine,
    platform: Platform,
    settings: PairSettings,
    lengths: ChatLengths,
    forced: Forced | None = None,  # None: the graphs that a run makes
    only: str | None = None,  # an arm; None: all
) -> Report:
    """Time the arms, interleaved; print time, memory, the share in which kernels run, and figures.

    Graphs keep memory while another arm runs: time a case that needs all of the GPU with one arm at a time.
    """
    if not machine.is_cuda:
        return Report([Skipped("R25", "CUDA graphs: this machine has no GPU")])
    packs_per_step = settings.num_microbatches
    with parallel_context(platform, settings) as context:
        engine, plan = random_engine(settings, machine, context)
        if forced is not None:
            all_models = True, [True] * len(engine.teachers)
            cuts = dict(cuts_at_experts=forced.cuts_at_experts, most_layers=forced.most_layers)
            graph_layers(engine.stages, context, *all_models, **cuts)
        random = np.random.default_rng(machine.seed + context.dp_rank)
        vocab = min(plan.student.shape.vocab_size, plan.teachers[0].shape.vocab_size)
        packs = [full_pack(settings.seq_length, vocab, lengths, random) for _ in range(packs_per_step)]
        batches = for_teachers([pack.to(context.device) for pack in packs], len(engine.teachers))
        steps = {
            EAGER: Step(engine, lambda: train_step(engine, batches), teacher=False, student=False),
            TEACHER: Step(engine, lambda: train_step(engine, batches), teacher=True, student=False),
            BOTH: Step(engine, lambda: train_step(engine, batches), teacher=True, student=True),
        }
        steps = {name: step for name, step in steps.items() if only in (None, name)}
        memory = {}
        for name, step in steps.items():
            for _ in range(WARM_UPS):
                step()
            torch.cuda.reset_peak_memory_stats()
            step()
            memory[name] = torch.cuda.max_memory_allocated() / GIB, torch.cuda.memory_reserved() / GIB
        times = time_arms([Arm(name, step) for name, step in steps.items()], machine.device, machine.rounds)
        rows = _rows(steps, times, memory)
        bounds = [str(one) for graphs, _ in graphs_of(engine, True, True)[:1] for one in graphs.bounds]
        case = f"{settings.student} <- {settings.teacher}, {packs_per_step} x {settings.seq_length}"
        if context.world_size > 1:
            case += f", TP {settings.tensor_parallel} PP {settings.pipeline_parallel}"
        if forced is not None:
            case += f", {forced}"
        if dist.get_rank() == 0:
            heads = ["", "ms", "of first", "GPU busy", "peak GiB", "reserved", "loss, norm"]
            title = f"graphs {case} {' '.join(settings.flags)}"
            print(table(title, heads, rows), "; ".join(bounds), sep="\n", flush=True)
        if only is not None:
            return Report([], times={case: times})
        ratio = Requirement("R25", times[BOTH] / times[EAGER], "of the step without graphs", "<=", 1.01)
        return Report([ratio], times={case: times})


def _rows(
    steps: dict[str, Step], times: dict[str, float], memory: dict[str, tuple[float, float]]
) -> list[list[str]]:
    """Return the table's rows. Times and figures are compared with those of the first arm."""
    figures, rows = {name: step.figures() for name, step in steps.items()}, []
    first = next(iter(steps))
    for name, step in steps.items():
        busy = kernel_times(step, is_cuda=True).busy_ms / times[name]
        away = max(abs(value / figures[first][key] - 1) for key, value in figures[name].items())
        rows.append(
            [name, f"{times[name]:.1f}", f"{times[name] / times[first]:.3f}", f"{busy:.2f}"]
            + [f"{gib:.2f}" for gib in memory[name]]
            + [f"{away:.1e}"]
        )
    return rows
