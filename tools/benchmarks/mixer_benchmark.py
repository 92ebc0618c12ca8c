"""Benchmark gated delta nets on a GPU: fused kernels beside plain torch, and the step of a pair with them.

Lines are printed as results come, so that a run that is cut short leaves what it has.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from mkd.families.mixer_shape import DeltaShape
from mkd.models.mixers.delta_net import DeltaNet
from mkd.models.mixers.fused_recurrence import FusedRecurrence
from mkd.models.mixers.mixer import MixerParts
from mkd.models.mixers.pack_rows import PackRows
from mkd.models.mixers.recurrence import PackedRecurrence
from mkd.parallel.context import ParallelContext
from mkd.plan.footprint.mixer_bytes import mixer_bytes, mixer_forward_bytes, mixer_gradient_bytes
from mkd.platform import Platform
from tools.benchmarks.benchmark_report import Report, Requirement, Skipped
from tools.benchmarks.expert_benchmark import Trial, with_most_layers
from tools.benchmarks.kernel_times import kernel_times
from tools.benchmarks.kernel_tuning import part_of_configurations
from tools.benchmarks.machine import Machine
from tools.benchmarks.measure import Arm, peak_bytes, time_arms
from tools.benchmarks.mixer_case import OPERATIONS, MixerCase, errors, gradients, same_bits
from tools.benchmarks.random_engine import PairSettings, parallel_context
from tools.benchmarks.shapes import shape_of
from tools.benchmarks.synthetic_documents import ChatLengths

MIB = 2**20
FUSED, TORCH = "fused", "plain torch"
LENGTHS = (700, 1, 2, 130, 64, 1100, 3, 40)  # documents of the packs whose errors are measured
MEMORY_FRACTION = 0.9  # of the GPU that the plan of the step may fill
SIZES = (64, 128, 256)  # channels of a head


@dataclass(frozen=True)
class Net:
    """A gated delta net, and the output of its first product for one pack."""

    module: DeltaNet
    shape: DeltaShape
    projected: Tensor  # [t, projected]
    rows: PackRows

    def with_operations(self, operations: PackedRecurrence) -> Net:
        self.module.recurrence = operations
        return self

    @torch.no_grad()
    def forward(self) -> None:
        self.module._mix(self.projected, self.rows)

    def step(self) -> None:
        """Run forward and backward."""
        inputs = [self.projected, self.module.A_log, self.module.conv_weight, self.module.norm_weight]
        output = self.module._mix(self.projected, self.rows)
        torch.autograd.grad(output, inputs, torch.ones_like(output))

    def kept(self) -> Tensor:
        """Return the output, behind which is all that backward needs."""
        return self.module._mix(self.projected, self.rows)


def benchmark(
    machine: Machine,
    platform: Platform,
    settings: PairSettings,
    lengths: ChatLengths,
    parts: tuple[str, ...],  # "errors", "kernels", "step"
    num_kernels: int,
) -> Report:
    """Print errors, times and memory of the mixers of both models, then the step of the pair."""
    if not machine.is_cuda:
        return Report([Skipped("R26", "gated delta nets as fused kernels: this machine has no GPU")])
    requirements: list[Requirement | Skipped] = []
    with parallel_context(platform, settings) as context:
        settings = with_most_layers(settings, [settings.teacher], machine, context, MEMORY_FRACTION)
        print(f"{settings.student} <- {settings.teacher}", flush=True)
        shapes = {name: _mixer_of(name) for name in (settings.teacher, settings.student)}
        nets = {
            name: _net(machine, context, name, shape, settings.seq_length) for name, shape in shapes.items()
        }
        if "errors" in parts:
            requirements += _errors(machine)
        if "kernels" in parts:
            requirements += _kernels(machine, nets, num_kernels)
        mixers_ms = _mixers_ms(machine, settings, nets) if "step" in parts else 0.0
        del nets
        _free()
        if "step" in parts:
            requirements += _step(machine, context, settings, lengths, num_kernels, mixers_ms)
    return Report(requirements)


def _mixer_of(name: str) -> DeltaShape:
    return next(layer.mixer for layer in shape_of(name).layers if layer.mixer)


def _net(machine: Machine, context: ParallelContext, name: str, mixer: DeltaShape, tokens: int) -> Net:
    hidden = shape_of(name).hidden_size
    options = dict(params_dtype=machine.dtype, gradient_accumulation_fusion=False)
    config = TransformerConfig(
        num_layers=1, hidden_size=hidden, num_attention_heads=mixer.key_heads, **options
    )
    linears = MixerParts(ColumnParallelLinear, RowParallelLinear)
    module = DeltaNet(config, linears, 1, mixer=mixer, pg_collection=context.groups)
    case = MixerCase(_documents(tokens))
    options = dict(device=machine.device, generator=machine.generator())
    projected = torch.randn(tokens, mixer.projected_width, **options).to(machine.dtype)
    return Net(module, mixer, projected.requires_grad_(), case.rows(machine.device))


def _documents(tokens: int) -> tuple[int, ...]:
    """Return lengths of some documents, a long one among them, that fill the pack."""
    lengths = [tokens // 4 + 13, tokens // 8 + 1, tokens // 8 - 77, tokens // 16, tokens // 16 + 5]
    while sum(lengths) < tokens:
        lengths.append(min(600 - len(lengths), tokens - sum(lengths)))
    return tuple(lengths)


def _kernels(machine: Machine, nets: dict[str, Net], num_kernels: int) -> list[Requirement]:
    found = []
    for name, net in nets.items():
        arms = {
            f"{kind}, {what}": Arm(f"{kind}, {what}", _bound(net, operations, what))
            for what in ("forward", "forward + backward")
            for kind, operations in ((FUSED, FusedRecurrence()), (TORCH, PackedRecurrence()))
        }
        rounds = min(machine.rounds, 5)
        times = time_arms(list(arms.values()), machine.device, rounds, warmup=1)
        tokens = net.projected.size(0)
        print(f"mixer of {name}, {tokens} tokens, {net.rows.borders.numel() - 1} documents:", flush=True)
        for what in ("forward", "forward + backward"):
            fused, plain = times[f"{FUSED}, {what}"], times[f"{TORCH}, {what}"]
            print(f"  {what}: {fused:.2f} ms, plain torch {plain:.1f} ms ({plain / fused:.1f} x)", flush=True)
        _print_memory(machine, net)
        _print_parts(machine, net)
        kernels = kernel_times(net.with_operations(FusedRecurrence()).step, machine.is_cuda)
        for kernel, (ms, calls) in list(kernels.by_name.items())[:num_kernels]:
            print(f"    {ms:7.3f} ms {calls:3d} x {kernel[:80]}", flush=True)
        fused, plain = (times[f"{kind}, forward + backward"] for kind in (FUSED, TORCH))
        found.append(Requirement("R26", fused / plain, f"{name}: of the time in plain torch", "<=", 0.2))
    return found


def _bound(net: Net, operations: PackedRecurrence, what: str) -> Callable[[], None]:
    def run() -> None:
        one = net.with_operations(operations)
        one.forward() if what == "forward" else one.step()

    return run


def _errors(machine: Machine) -> list[Requirement]:
    """Print errors against float64, and whether runs repeat. Kernels have their first configurations."""
    worst = {}
    for size in SIZES:
        for lengths, padding in ((LENGTHS, 40), *([((2000,), 0)] if size == SIZES[0] else [])):
            case = MixerCase(lengths, padding, key_dim=size, value_dim=size)
            for name in OPERATIONS:
                try:
                    with part_of_configurations(0, None):
                        largest = _print_errors(machine, case, name)
                except Exception as error:  # of Triton: the other sizes are still of interest
                    print(f"{name}, {size}: {type(error).__name__} {str(error)[:200]}", flush=True)
                    largest = float("nan")
                worst[f"{name}, {size} channels"] = largest
    return [Requirement("R27", value, f"{name}: largest error", "<=", 0.02) for name, value in worst.items()]


def _print_errors(machine: Machine, case: MixerCase, name: str) -> float:
    """Print the errors of one operation; return the largest one of the fused form."""
    where = machine.device, machine.dtype
    found = errors(case, (FusedRecurrence(), PackedRecurrence()), name, *where)
    repeats = same_bits(case, FusedRecurrence(), name, *where)
    print(f"{name}, {case}: repeats {repeats}", flush=True)
    for kind, of_kind in zip((FUSED, TORCH), found, strict=True):
        print(f"  {kind}: " + ", ".join(f"{key} {value:.1e}" for key, value in of_kind.items()), flush=True)
    return max(found[0].values())


def _print_memory(machine: Machine, net: Net) -> None:
    """Print kept bytes and peaks of a token beside the plan's, which leaves out the output of 2 n dv."""
    tokens = net.projected.size(0)
    for kind, operations in ((FUSED, FusedRecurrence()), (TORCH, PackedRecurrence())):
        net.with_operations(operations)
        is_fused, element = kind == FUSED, net.projected.element_size()
        output = net.shape.output_width * element
        _free()
        before = torch.cuda.memory_allocated()
        result = net.kept()
        kept = (torch.cuda.memory_allocated() - before) / tokens - output
        del result
        forward = peak_bytes(Arm("", net.forward), machine.device) / tokens
        step = peak_bytes(Arm("", net.step), machine.device) / tokens
        planned = mixer_bytes(net.shape, element, is_fused)
        planned_step = planned + output + mixer_gradient_bytes(net.shape, element, is_fused)
        planned_forward = mixer_forward_bytes(net.shape, element, is_fused)
        print(
            f"  {kind}, bytes a token (plan): kept {kept:.0f} ({planned}), forward peak {forward:.0f} "
            f"({planned_forward} with the input's {net.shape.projected_width * element}), "
            f"step peak {step:.0f} ({planned_step})",
            flush=True,
        )


def _print_parts(machine: Machine, net: Net) -> None:
    """Print the times of the fused operations."""
    mixer, device = net.shape, machine.device
    sizes = (mixer.key_heads, mixer.value_heads, mixer.key_dim, mixer.value_dim)
    case = MixerCase(_documents(net.projected.size(0)), 0, *sizes)
    inputs, fused = case.inputs(device, machine.dtype, machine.seed), FusedRecurrence()

    def forward(name: str) -> None:
        call, names = OPERATIONS[name]
        with torch.no_grad():
            call(fused, [inputs[one] for one in names], net.rows)

    for name in OPERATIONS:
        arms = [
            Arm("forward", lambda name=name: forward(name)),
            Arm("both", lambda name=name: gradients(fused, name, inputs, net.rows, machine.dtype)),
        ]
        times = time_arms(arms, device, min(machine.rounds, 5), warmup=1)
        print(
            f"  {name}: forward {times['forward']:.2f} ms, with backward {times['both']:.2f} ms", flush=True
        )


def _mixers_ms(machine: Machine, settings: PairSettings, nets: dict[str, Net]) -> float:
    """Return the time of all mixers in the micro-batches of a step, one by one."""
    total = 0.0
    for name, net in nets.items():
        what = "forward + backward" if name == settings.student else "forward"
        arms = [Arm(what, _bound(net, FusedRecurrence(), what))]
        (ms,) = time_arms(arms, machine.device, min(machine.rounds, 5)).values()
        layers = sum(layer.mixer is not None for layer in shape_of(name).layers)
        total += ms * layers
    return total * settings.num_microbatches


def _step(
    machine: Machine,
    context: ParallelContext,
    settings: PairSettings,
    lengths: ChatLengths,
    num_kernels: int,
    mixers_ms: float,
) -> list[Requirement]:
    """Measure the step, its memory, and the share of mixers by the times of each alone."""
    trial = Trial(machine, context, settings, lengths, num_kernels)
    trial.attempt(trial.distil, settings.teacher)
    found = []
    for name, row in trial.rows.items():
        if name.startswith("KD"):
            share = mixers_ms / row.ms
            trial.say(f"mixers between their products: {mixers_ms:.1f} ms, {share:.3f} of the step")
        if row.memory_ratio is not None:
            deviation = abs(row.memory_ratio - 1)
            found.append(Requirement("R20", deviation, f"{name}: of the plan's memory", "<=", 0.05))
    return found


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
