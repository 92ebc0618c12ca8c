"""Report what the place and the precision of a teacher, and residency of the optimizer, cost and save.

Engines with random weights run one after another; the first one runs again at the end, which shows how far
the machine drifts. Losses must have the same bits, except with FP8. With deterministic kernels every step is
compared, because only then do two runs on the device agree. The default kernels are faster and need less
memory for long packs; with them only the loss of the first step is compared.

Rank 0 prints a line after each engine, and the table at the end. "Teacher" is its layers' forward, "of plan"
the peak over what `mkd plan` predicts, "teacher kept" the teacher's memory between steps over that in bf16
(from the difference to the first engine).

    python -m tests.models.residency_report               # an 8B teacher, a 1.7B student: one H200
    python -m tests.models.residency_report --seq-length 2048 --deterministic
    python -m tests.models.residency_report --arms device "fp8 tensorwise" "fp8 blockwise"
    torchrun --nproc-per-node 2 -m tests.models.residency_report --arms device peers "fp8 peers" --profile
    python -m tests.models.residency_report --student tiny-student --teacher tiny-teacher --seq-length 256
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from mkd.platform import detect, make_deterministic
from tests.models.fp8_stand_in import stand_in_recipes
from tools.benchmarks.benchmark_report import table
from tools.benchmarks.machine import Machine
from tools.benchmarks.measure import Arm, time_arms
from tools.benchmarks.overlap import profile_overlap

GIB = 2**30
TRANSFERS = ("AllGather", "HtoD")
FP8 = ("--teacher-precision", "fp8")
HOST = ("--teacher-residency", "host")
PEERS = ("--teacher-residency", "peers", "--teacher-peers")  # their number follows
ARMS = {
    "device": (),
    "host": HOST,
    "optimizer on the host": ("--optimizer-residency", "host"),
    "both on the host": (*HOST, "--optimizer-residency", "host"),
    "fp8 tensorwise": FP8,
    "fp8 blockwise": (*FP8, "--teacher-fp8-recipe", "blockwise"),
    "fp8 host": (*FP8, *HOST),
    "peers": PEERS,
    "fp8 peers": (*FP8, *PEERS),
}


def flags_of(name: str, world_size: int) -> tuple[str, ...]:
    """Return the flags of an engine."""
    flags = ARMS[name]
    return (*flags, str(world_size)) if "--teacher-peers" in flags else flags


@dataclass(frozen=True)
class Measured:
    """Measurements of one engine."""

    losses: list[float]  # the sum of every step, and the gradient norm
    step_ms: float
    teacher_ms: float  # the teacher's layers in a step
    peak_gib: float  # during the steps
    planned_gib: float  # predicted peak
    rest_gib: float  # between two steps
    teacher_gib: float  # the whole teacher in bf16, predicted


def measure(name: str, args: argparse.Namespace, machine: Machine, context) -> Measured:
    from mkd.models.stage import take_teacher_ms
    from mkd.train.step import train_step
    from tools.benchmarks.random_engine import PairSettings, random_engine
    from tools.benchmarks.synthetic_documents import ChatLengths, for_teachers, full_pack

    begin = time.perf_counter()
    flags = ("--lr", "1e-4", *(("--deterministic-mode",) if args.deterministic else ()))
    flags = (*flags, *args.flags.split(), *flags_of(name, context.world_size))
    settings = PairSettings(
        args.student, args.teacher, args.seq_length, 1, args.num_microbatches, flags=flags
    )
    with nullcontext() if machine.is_cuda else stand_in_recipes():
        engine, plan = random_engine(settings, machine, context)
    built_s = time.perf_counter() - begin
    random = np.random.default_rng(machine.seed)
    vocab = min(plan.student.shape.vocab_size, plan.teachers[0].shape.vocab_size)
    lengths = ChatLengths(args.seq_length // 8, args.seq_length // 2)
    batches = [
        full_pack(args.seq_length, vocab, lengths, random).to(context.device)
        for _ in range(args.num_microbatches)
    ]
    losses, teacher_ms = [], []

    def step() -> None:
        result = train_step(engine, for_teachers(batches, len(engine.teachers)))
        losses.extend((result.sums.token_sums()["loss"], result.grad_norm))
        teacher_ms.append(take_teacher_ms(engine.stages))

    step()  # creates the moments
    if machine.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    milliseconds = time_arms([Arm("step", step)], machine.device, machine.rounds)["step"]
    peak, rest = (
        (torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()) if machine.is_cuda else (0, 0)
    )
    losses = losses if args.deterministic else losses[:1]
    planned = plan.forecast.memory.ranks[context.pp_rank].allocated_gib
    whole = 2 * sum(plan.forecast.figures()["teacher_parameters"]) / GIB
    found = Measured(losses, milliseconds, median(teacher_ms), peak / GIB, planned, rest / GIB, whole)
    if context.rank == 0:
        line = f"{name}: built in {built_s:.0f} s, step {milliseconds:.1f} ms, teacher {found.teacher_ms:.1f}"
        print(f"{line}, peak {found.peak_gib:.2f} GiB, planned {planned:.2f}, {losses[:2]}", flush=True)
    if args.profile and machine.is_cuda:
        overlap = profile_overlap(step, TRANSFERS)
        if context.rank == 0:
            print(f"{name}: {overlap.describe()}", flush=True)
    return found


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.deterministic:
        make_deterministic()
    platform = detect()
    from tools.benchmarks.random_engine import PairSettings, parallel_context

    dtype = torch.bfloat16 if platform.is_cuda else torch.float32
    machine = Machine(platform.device, dtype, args.rounds, seed=0, compile=False)
    measured = {}
    with parallel_context(platform, PairSettings(args.student, args.teacher, args.seq_length)) as context:
        first, *others = args.arms or [name for name in ARMS if context.world_size > 1 or "peers" not in name]
        for name in (first, *others, *([first] if others else [])):
            measured[f"{name}, again" if name in measured else name] = measure(name, args, machine, context)
            gc.collect()
            torch.cuda.empty_cache()
        if context.rank == 0:
            show(measured, args, machine)
    exact = [one.losses for name, one in measured.items() if "fp8" not in name]
    return int(any(losses != exact[0] for losses in exact))


def parser() -> argparse.ArgumentParser:
    """Build the parser."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = flags.add_argument
    add("--student", default="qwen3-1.7b", help="student's shape in tools/benchmarks/shapes.py")
    add("--teacher", default="qwen3-8b", help="teacher's shape in tools/benchmarks/shapes.py")
    add("--seq-length", type=int, default=8192, help="tokens of a micro-batch")
    add("--num-microbatches", type=int, default=4, help="micro-batches of a step")
    add("--rounds", type=int, default=5, help="timed steps, after two untimed ones")
    add("--deterministic", action="store_true", help="compare all steps, not only the first loss")
    add("--arms", nargs="+", choices=ARMS, help="engines to measure (default: all)")
    add("--flags", default="", help="more flags of pretrain_kd.py")
    add("--profile", action="store_true", help="profile one more step: transfers beside other kernels")
    return flags


def show(measured: dict[str, Measured], args: argparse.Namespace, machine: Machine) -> None:
    """Print a row for each engine."""
    base = next(iter(measured.values()))
    rows = [
        [
            name,
            f"{one.step_ms:.1f}",
            f"{one.step_ms / base.step_ms:.3f}",
            f"{one.teacher_ms:.1f}",
            f"{one.teacher_ms / base.teacher_ms:.3f}",
            *(_memory(one, base) if machine.is_cuda else "----"),
            "same bits" if one.losses == base.losses else f"{one.losses[0] / base.losses[0] - 1:.2e} more",
        ]
        for name, one in measured.items()
    ]
    title = f"{args.student} <- {args.teacher}, {args.num_microbatches} x {args.seq_length} tokens"
    columns = ["", "step, ms", "ratio", "teacher, ms", "ratio", "peak, GiB", "of plan", "between steps, GiB"]
    print(machine.describe(), table(title, [*columns, "teacher kept", "first loss"], rows), sep="\n")


def _memory(one: Measured, base: Measured) -> list[str]:
    kept = 1 - (base.rest_gib - one.rest_gib) / one.teacher_gib
    return [
        f"{one.peak_gib:.2f}",
        f"{one.peak_gib / one.planned_gib:.3f}",
        f"{one.rest_gib:.2f}",
        f"{kept:.3f}",
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
