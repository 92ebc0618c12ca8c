"""The command line of `tools/benchmark.py`: one subcommand per benchmark.

Modules that import Megatron are imported after `detect`, which quiets its remarks.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mkd.config.flags import FlagParser
from mkd.errors import UsageError, returns_exit_code
from mkd.platform import Platform, detect
from tools.benchmarks.machine import Machine, ceilings
from tools.benchmarks.report import Report, merge

if TYPE_CHECKING:
    from tools.benchmarks.random_engine import PairSettings
    from tools.benchmarks.synthetic_documents import ChatLengths

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def parser() -> argparse.ArgumentParser:
    """All flags. A flag that is not given takes a value that suits the device (CPU: seconds in CI)."""
    main = FlagParser(prog="benchmark.py", description="Measure mkd beside its peers, as ratios.")
    commands = main.add_subparsers(dest="command", required=True)
    _add(commands, "ceilings", run_ceilings, "copy bandwidth and matrix-product rate of the device")
    logits = _add(commands, "logits", run_logits, "divergences on logits: R1 R2 R3 R4 R8, on CPU R8 R12")
    logits.add_argument("--shape", nargs="+", type=sizes(2), metavar="N,V", help="rows and vocabulary")
    head = _add(
        commands, "head", run_head, "LM heads and loss in one: R4 R5 R6; under torchrun strong scaling, R7"
    )
    head.add_argument(
        "--shape", nargs="+", type=sizes(4), metavar="N,HS,HT,V", help="rows, hidden sizes, vocabulary"
    )
    head.add_argument("--chunk-rows", type=int, help="rows of a chunk of our head; not given: the engine's")
    chunks = _add(
        commands, "chunks", run_chunks, "losses between tokenizers, heads included, beside the bare products"
    )
    chunks.add_argument(
        "--shape",
        nargs="+",
        type=sizes(5),
        metavar="C,HS,HT,VS,VT",
        help="chunks, hidden sizes, vocabularies",
    )
    chunks.add_argument("--losses", nargs="+", help="of --xtoken-loss; all if not given")
    step = _add(
        commands, "step", run_step, "a training step of the engine, beside SFT and the teacher's forward: R10"
    )
    packing = _add(commands, "packing", run_packing, "packs against padded batches: R9")
    packing.add_argument("--documents", type=int, help="documents of a step")
    pipeline = _add(
        commands, "pipeline", run_pipeline, "under torchrun: the step against the bubble formula, R11"
    )
    for command in (step, packing, pipeline):
        command.add_argument(
            "--student-shape",
            help="qwen3-1.7b on a GPU, tiny-student on a CPU; see tools/benchmarks/shapes.py",
        )
        command.add_argument("--teacher-shape", help="qwen3-8b on a GPU, tiny-teacher on a CPU")
        command.add_argument(
            "--seq-length", type=int, help="tokens of a pack, one micro-batch; 8192, on a CPU 256"
        )
        command.add_argument(
            "--flags", default="", help="more flags of pretrain_kd.py: --flags='--clip-grad 0'"
        )
    for command in (step, pipeline):
        command.add_argument("--microbatches", type=int, default=4, help="packs of a step")
        command.add_argument("--tensor-parallel", type=int, default=1, help="ranks that share every layer")
        command.add_argument("--pipeline-parallel", type=int, default=1, help="pipeline ranks")
        command.add_argument("--virtual-stages", type=int, default=1, help="model chunks of each rank")
    return main


def _add(commands, name: str, run: Callable, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=run)
    command.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: the GPU, if there is one"
    )
    command.add_argument("--dtype", choices=DTYPES, help="bf16 on a GPU, fp32 on a CPU")
    command.add_argument("--rounds", type=int, default=10, help="timed calls of each arm; the median counts")
    command.add_argument("--threads", type=int, default=1, help="CPU threads")
    command.add_argument("--seed", type=int, help="of the random inputs; not given: another one in every run")
    command.add_argument("--strict", action="store_true", help="exit code 1 when a requirement is missed")
    command.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="also time torch.compile of the plain losses; on a GPU by default",
    )
    return command


def sizes(count: int) -> Callable[[str], tuple[int, ...]]:
    """Parser of `count` positive integers with commas between."""

    def parse(text: str) -> tuple[int, ...]:
        values = tuple(int(part) for part in text.split(","))
        if len(values) != count or min(values) < 1:
            raise ValueError(text)
        return values

    parse.__name__ = f"{count} positive integers"
    return parse


def machine_of(args: argparse.Namespace, platform: Platform) -> Machine:
    """Raises UsageError for `--device cuda` where there is no GPU."""
    kind = platform.device.type if args.device == "auto" else args.device
    if kind == "cuda" and not platform.is_cuda:
        raise UsageError(
            "--device cuda, but torch sees no GPU",
            "",
            "use --device cpu, or start it where there is one",
            code="benchmark-without-gpu",
        )
    if kind == "cpu":
        torch.set_num_threads(args.threads)
    return Machine(
        device=platform.device if kind == platform.device.type else torch.device(kind),
        dtype=DTYPES[args.dtype or ("bf16" if kind == "cuda" else "fp32")],
        rounds=args.rounds,
        seed=time.time_ns() % 2**31 if args.seed is None else args.seed,
        compile=kind == "cuda" if args.compile is None else args.compile,
    )


def run_ceilings(args: argparse.Namespace, machine: Machine) -> Report:
    return ceilings(machine)


def run_logits(args: argparse.Namespace, machine: Machine) -> Report:
    from tools.benchmarks.logits import benchmark

    if machine.compile:
        compile_every_shape()
    shapes = args.shape or [(8192, 151936) if machine.is_cuda else (256, 32000)]
    return merge([benchmark(machine, rows, vocab) for rows, vocab in shapes])


def run_head(args: argparse.Namespace, machine: Machine) -> Report:
    from tools.benchmarks import head, head_tp
    from tools.benchmarks.head_case import HeadShape

    if machine.compile:
        compile_every_shape()
    shapes = args.shape or [(8192, 2048, 4096, 151936) if machine.is_cuda else (256, 64, 96, 8000)]
    benchmark = head_tp.benchmark if is_parallel() else head.benchmark
    return merge([benchmark(machine, HeadShape(*shape), args.chunk_rows) for shape in shapes])


def run_chunks(args: argparse.Namespace, machine: Machine) -> Report:
    from mkd.config.models import XTOKEN_LOSSES
    from tools.benchmarks.chunks import ChunkShape, benchmark

    shapes = args.shape or [(8192, 2048, 4096, 32000, 151936) if machine.is_cuda else (64, 32, 48, 400, 700)]
    return merge(
        [benchmark(machine, ChunkShape(*shape), tuple(args.losses or XTOKEN_LOSSES)) for shape in shapes]
    )


def run_step(args: argparse.Namespace, machine: Machine) -> Report:
    from tools.benchmarks.step import benchmark

    return benchmark(machine, detect(), pair_settings(args, machine), chat_lengths(machine))


def run_packing(args: argparse.Namespace, machine: Machine) -> Report:
    from tools.benchmarks.packing import benchmark

    documents = args.documents or (64 if machine.is_cuda else 16)
    return benchmark(machine, detect(), pair_settings(args, machine), chat_lengths(machine), documents)


def run_pipeline(args: argparse.Namespace, machine: Machine) -> Report:
    from tools.benchmarks.pipeline import benchmark

    return benchmark(machine, detect(), pair_settings(args, machine), chat_lengths(machine))


def pair_settings(args: argparse.Namespace, machine: Machine) -> PairSettings:
    from tools.benchmarks.random_engine import PairSettings

    defaults = ("qwen3-1.7b", "qwen3-8b", 8192) if machine.is_cuda else ("tiny-student", "tiny-teacher", 256)
    given = (args.student_shape, args.teacher_shape, args.seq_length)
    student, teacher, seq_length = (value or default for value, default in zip(given, defaults, strict=True))
    return PairSettings(
        student,
        teacher,
        seq_length,
        num_microbatches=getattr(args, "microbatches", 1),
        tensor_parallel=getattr(args, "tensor_parallel", 1),
        pipeline_parallel=getattr(args, "pipeline_parallel", 1),
        virtual_stages=getattr(args, "virtual_stages", 1),
        flags=tuple(args.flags.split()),
    )


def chat_lengths(machine: Machine) -> ChatLengths:
    from tools.benchmarks.synthetic_documents import ChatLengths

    return ChatLengths(600, 4096) if machine.is_cuda else ChatLengths(40, 256)


def is_parallel() -> bool:
    """Whether torchrun has started several processes."""
    return dist.is_initialized() and dist.get_world_size() > 1


@returns_exit_code
def main(argv: list[str]) -> int:
    """Run one benchmark; its table comes first, its requirement lines last. Returns the exit code."""
    return run(parser().parse_args(argv), detect())


def run(args: argparse.Namespace, platform: Platform) -> int:
    """The benchmark, on all processes of torchrun or of a group that the caller has joined; rank 0 speaks."""
    joined_before = dist.is_initialized()
    machine = machine_of(args, platform)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not joined_before:
        from mkd.parallel.context import join_process_group

        join_process_group(platform, timedelta(minutes=10))
    if is_parallel():
        machine = replace(machine, seed=same_on_all_ranks(machine.seed, platform))
    speaks = not is_parallel() or dist.get_rank() == 0
    try:
        if speaks:
            print(machine.describe())
        report = args.run(args, machine)
        for line in report.lines() if speaks else ():
            print(line)
        return report.exit_code(args.strict)
    finally:
        if dist.is_initialized() and not joined_before:
            dist.destroy_process_group()


def compile_every_shape() -> None:
    """Each shape and chunk size its own code: by default torch soon compiles for any shape, or gives up, and peers suffer.

    For losses alone: the engine meets more lengths than it would be worth compiling for, where documents are padded.
    """
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.recompile_limit = 64


def same_on_all_ranks(value: int, platform: Platform) -> int:
    """That of rank 0."""
    tensor = torch.tensor(value, device=platform.device)
    dist.broadcast(tensor, src=0)
    return int(tensor)
