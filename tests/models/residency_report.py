"""Report what residency costs and saves: peak memory and step time, with the same loss, bit for bit.

Engines with random weights run one after another: everything on the device, the teacher on the host, the
optimizer's state on the host, both; on several processes also the teacher split over them. With deterministic
kernels every step is compared, because only then do
two runs on the device agree. The default kernels are faster and need less memory for long packs; with them
only the loss of the first step is compared.

    python -m tests.models.residency_report               # an 8B teacher, a 1.7B student: one H200
    python -m tests.models.residency_report --seq-length 2048 --deterministic
    torchrun --nproc-per-node 2 -m tests.models.residency_report
    python -m tests.models.residency_report --student tiny-student --teacher tiny-teacher --seq-length 256
"""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from mkd.platform import detect, make_deterministic
from tools.benchmarks.benchmark_report import table
from tools.benchmarks.machine import Machine
from tools.benchmarks.measure import Arm, time_arms

GIB = 2**30
BASE = "device"
ARMS = {
    BASE: (),
    "teacher on the host": ("--teacher-residency", "host"),
    "optimizer on the host": ("--optimizer-residency", "host"),
    "both on the host": ("--teacher-residency", "host", "--optimizer-residency", "host"),
}


def arms(world_size: int) -> dict[str, tuple[str, ...]]:
    """Return the flags of every engine."""
    peers = ("--teacher-residency", "peers", "--teacher-peers", str(world_size))
    return ARMS | ({f"teacher over {world_size} peers": peers} if world_size > 1 else {})


@dataclass(frozen=True)
class Measured:
    """Measurements of one engine."""

    losses: list[float]  # the sum of every step, and the gradient norm
    step_ms: float
    teacher_ms: float  # the teacher's layers in a step
    peak_gib: float  # during the steps
    rest_gib: float  # between two steps


def measure(flags: tuple[str, ...], args: argparse.Namespace, machine: Machine, context) -> Measured:
    from mkd.models.stage import take_teacher_ms
    from mkd.train.step import train_step
    from tools.benchmarks.random_engine import PairSettings, random_engine
    from tools.benchmarks.synthetic_documents import ChatLengths, for_teachers, full_pack

    flags = ("--lr", "1e-4", *(("--deterministic-mode",) if args.deterministic else ()), *flags)
    settings = PairSettings(
        args.student, args.teacher, args.seq_length, 1, args.num_microbatches, flags=flags
    )
    engine, plan = random_engine(settings, machine, context)
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
    return Measured(losses, milliseconds, median(teacher_ms), peak / GIB, rest / GIB)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--student", default="qwen3-1.7b", help="student's shape in tools/benchmarks/shapes.py"
    )
    parser.add_argument("--teacher", default="qwen3-8b", help="teacher's shape in tools/benchmarks/shapes.py")
    parser.add_argument("--seq-length", type=int, default=8192, help="tokens of a micro-batch")
    parser.add_argument("--num-microbatches", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps, after two untimed ones")
    parser.add_argument(
        "--deterministic", action="store_true", help="compare all steps, not only the first loss"
    )
    args = parser.parse_args(argv)
    if args.deterministic:
        make_deterministic()
    platform = detect()
    from tools.benchmarks.random_engine import PairSettings, parallel_context

    dtype = torch.bfloat16 if platform.is_cuda else torch.float32
    machine = Machine(platform.device, dtype, args.rounds, seed=0, compile=False)
    measured = {}
    with parallel_context(platform, PairSettings(args.student, args.teacher, args.seq_length)) as context:
        for name, flags in arms(context.world_size).items():
            measured[name] = measure(flags, args, machine, context)
            gc.collect()
            torch.cuda.empty_cache()
        if context.rank == 0:
            show(measured, args, machine)
    return int(any(one.losses != measured[BASE].losses for one in measured.values()))


def show(measured: dict[str, Measured], args: argparse.Namespace, machine: Machine) -> None:
    """Print a row for each engine."""
    base = measured[BASE]
    rows = [
        [
            name,
            f"{one.step_ms:.1f}",
            f"{one.step_ms / base.step_ms:.3f}",
            f"{one.teacher_ms:.1f}",
            f"{one.teacher_ms / base.teacher_ms:.3f}",
            *(f"{gib:.2f}" if machine.is_cuda else "-" for gib in (one.peak_gib, one.rest_gib)),
            "same bits" if one.losses == base.losses else "DIFFERENT",
        ]
        for name, one in measured.items()
    ]
    title = f"{args.student} <- {args.teacher}, {args.num_microbatches} x {args.seq_length} tokens"
    columns = ["", "step, ms", "ratio", "teacher, ms", "ratio", "peak, GiB", "between steps, GiB", "losses"]
    print(machine.describe(), table(title, columns, rows), sep="\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
