"""Command line of `tools/benchmark.py`: one subcommand per benchmark.

Modules that import Megatron are imported after `detect`, which silences Megatron's warnings.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from mkd.config.flags import FlagParser
from mkd.errors import UsageError, returns_exit_code
from mkd.platform import Platform, detect
from tools.benchmarks.machine import Machine
from tools.benchmarks.results import append_figures
from tools.benchmarks.runners import (
    is_parallel,
    run_ceilings,
    run_corpus,
    run_decode,
    run_experts,
    run_graphs,
    run_head,
    run_layouts,
    run_library,
    run_logits,
    run_mixer,
    run_pipeline,
    run_step,
    run_trainers,
)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def parser() -> argparse.ArgumentParser:
    """Build the parser. Defaults suit the device: on a CPU a benchmark takes seconds."""
    main = FlagParser(prog="benchmark.py", description="Measure mkd and its peers, as ratios.")
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
    head.add_argument(
        "--block-rows",
        type=int,
        help="rows of a block of logits in mkd's head (default: the engine's choice)",
    )
    library = _add(commands, "library", run_library, "DistillationLoss beside Liger, TRL and torch.compile")
    library.add_argument(
        "--shape", nargs="+", type=sizes(4), metavar="N,HS,HT,V", help="rows, hidden sizes, vocabulary"
    )
    step = _add(
        commands, "step", run_step, "a training step, beside the SFT step and the teacher's forward: R10"
    )
    step.add_argument("--profile", action="store_true", help="also print what GPU and CPU do in each of them")
    pipeline = _add(
        commands, "pipeline", run_pipeline, "under torchrun: the step against the bubble formula, R11"
    )
    graphs = _add_graph_command(commands)
    layouts = _add_layout_command(commands)
    trainers = _add(
        commands, "trainers", run_trainers, "a step beside those of transformers, Liger and TRL: R13"
    )
    trainers.add_argument("--documents", type=int, help="documents of a step (default: 64, on a CPU 16)")
    trainers.add_argument(
        "--document-length", type=int, help="tokens of every document (default: lengths of conversations)"
    )
    trainers.add_argument(
        "--padded",
        type=int,
        default=2,
        help="documents of a padded batch (default: 2: TRL's logits of 4 do not fit beside 1.7B and 8B)",
    )
    mixer = _add_mixer_command(commands)
    _add_pair_flags((step, pipeline, graphs, layouts, trainers, mixer, _add_decode_command(commands)))
    _add_layout_flags((step, pipeline, graphs, mixer))
    _add_expert_command(commands)
    _add_corpus_command(commands)
    return main


def _add_graph_command(commands) -> argparse.ArgumentParser:
    graphs = _add(
        commands, "graphs", run_graphs, "a step with CUDA graphs, beside the same step without: R25"
    )
    graphs.add_argument(
        "--experts",
        choices=("inside", "between"),
        help="graph every model, also those that a run does not: experts in the graphs, or between them",
    )
    graphs.add_argument(
        "--only",
        choices=("without", "teacher", "both"),
        help="time one arm alone (default: all, interleaved)",
    )
    graphs.add_argument(
        "--teacher-seed",
        type=int,
        default=0,
        help="seed of the teacher's weights; 0: a teacher of the student's shape is equal to it (default: 0)",
    )
    graphs.add_argument(
        "--most-layers", type=int, help="layers of the student in one graph (default: all of a part)"
    )
    return graphs


def _add_layout_command(commands) -> argparse.ArgumentParser:
    text = "the same step in several layouts, each beside the plan's prediction: R20"
    layouts = _add(commands, "layouts", run_layouts, text)
    layouts.add_argument(
        "--layouts",
        nargs="+",
        default=["dp"],
        metavar="WORDS",
        help="layouts; each is words with commas between them: tpN, ppN, vpN, epN, peersN, aheadN, dp, fp8, "
        "host, eager, distributed, auto, sft, such as tp2,pp2 (default: dp, data parallelism alone)",
    )
    layouts.add_argument(
        "--packs", type=int, default=8, help="packs of a step, of all processes (default: 8)"
    )
    layouts.add_argument("--profile", action="store_true", help="also print the time of kernels by kind")
    return layouts


def _add_decode_command(commands) -> argparse.ArgumentParser:
    decode = _add(
        commands, "decode", run_decode, "sampling beside transformers, and its share of a step: R24"
    )
    decode.add_argument("--batch", type=int, help="completions at a time (default: 256, on a CPU 4)")
    decode.add_argument("--prompt-tokens", type=int, help="tokens of a prompt (default: 128, on a CPU 16)")
    decode.add_argument("--new-tokens", type=int, help="tokens of a completion (default: 512, on a CPU 24)")
    return decode


def _add_mixer_command(commands) -> argparse.ArgumentParser:
    text = "gated delta nets: fused kernels beside plain torch, and a step with them: R20 R26 R27"
    mixer = _add(commands, "mixer", run_mixer, text)
    parts = ("errors", "kernels", "step")
    mixer.add_argument("--parts", nargs="+", choices=parts, default=parts, help="parts (default: all)")
    mixer.add_argument("--kernels", type=int, default=14, help="longest kernels to list (default: 14)")
    return mixer


def _add_expert_command(commands) -> None:
    text = "a step with experts, beside the teacher's forward and Megatron's SFT step: R10 R20"
    experts = _add(commands, "experts", run_experts, text)
    experts.add_argument(
        "--student-shape",
        help="student of tools/benchmarks/shapes.py; NAME:N has N of its layers (default: as many layers of "
        "qwen3-30b-a3b as fit, on a CPU tiny-moe)",
    )
    experts.add_argument(
        "--teacher-shapes",
        nargs="+",
        help="teachers (default: qwen3-8b:8 qwen3-235b-a22b:2, on a CPU tiny-teacher tiny-moe)",
    )
    experts.add_argument("--seq-length", type=int, help="tokens of a pack (default: 8192, on a CPU 256)")
    experts.add_argument("--packs", type=int, default=1, help="packs of a micro-batch (default: 1)")
    experts.add_argument("--microbatches", type=int, default=4, help="micro-batches of a step (default: 4)")
    experts.add_argument(
        "--memory-fraction",
        type=float,
        default=0.88,
        help="share of the GPU that the plan may fill (default: 0.88)",
    )
    experts.add_argument("--kernels", type=int, default=12, help="longest kernels to list (default: 12)")
    experts.add_argument("--flags", default="", help="more flags of pretrain_kd.py: --flags='--clip-grad 0'")


def _add_corpus_command(commands) -> None:
    corpus = _add(commands, "corpus", run_corpus, "start of a run on a large corpus: R14 to R18")
    corpus.add_argument(
        "--documents", type=int, default=1_000_000, help="documents of 5 to 60 tokens (default: 1000000)"
    )
    corpus.add_argument("--seq-length", type=int, default=4096, help="tokens of a pack (default: 4096)")
    corpus.add_argument("--workers", type=int, default=2, help="most processes that pack (default: 2)")
    corpus.add_argument("--loss-mask", action="store_true", help="mask the first half of every document")
    corpus.add_argument(
        "--folder", type=Path, help="folder for the corpus, 90 bytes a document (default: a temporary one)"
    )


def _add_pair_flags(commands: Sequence[argparse.ArgumentParser]) -> None:
    for command in commands:
        command.add_argument(
            "--student-shape",
            help="student of tools/benchmarks/shapes.py; NAME:N has N of its layers "
            "(default: qwen3-1.7b, on a CPU tiny-student)",
        )
        command.add_argument("--teacher-shape", help="teacher (default: qwen3-8b, on a CPU tiny-teacher)")
        command.add_argument(
            "--seq-length",
            type=int,
            help="tokens of a pack; a micro-batch is one (default: 8192, on a CPU 256)",
        )
        command.add_argument(
            "--flags", default="", help="more flags of pretrain_kd.py: --flags='--clip-grad 0'"
        )


def _add_layout_flags(commands: Sequence[argparse.ArgumentParser]) -> None:
    for command in commands:
        command.add_argument("--microbatches", type=int, default=4, help="packs of a step (default: 4)")
        command.add_argument(
            "--tensor-parallel", type=int, default=1, help="ranks that share every layer (default: 1)"
        )
        command.add_argument("--pipeline-parallel", type=int, default=1, help="pipeline ranks (default: 1)")
        command.add_argument(
            "--virtual-stages", type=int, default=1, help="model parts of each pipeline rank (default: 1)"
        )


def _add(commands, name: str, run: Callable, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=run)
    command.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device; auto is the GPU if there is one",
    )
    command.add_argument("--dtype", choices=DTYPES, help="dtype (default: bf16, on a CPU fp32)")
    command.add_argument(
        "--rounds", type=int, default=10, help="timed calls of each arm, for the median (default: 10)"
    )
    command.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    command.add_argument(
        "--seed", type=int, help="seed of the random inputs (default: a new one in every run)"
    )
    command.add_argument("--strict", action="store_true", help="exit with 1 if a requirement is missed")
    command.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="also time torch.compile of the plain losses (default: on a GPU)",
    )
    command.add_argument(
        "--csv",
        type=Path,
        metavar="FILE",
        help="file to append the medians to, such as tools/benchmarks/results/head.csv (default: none)",
    )
    return command


def sizes(count: int) -> Callable[[str], tuple[int, ...]]:
    """Return a parser of `count` positive integers, separated by commas."""

    def parse(text: str) -> tuple[int, ...]:
        values = tuple(int(part) for part in text.split(","))
        if len(values) != count or min(values) < 1:
            raise ValueError(text)
        return values

    parse.__name__ = f"{count} positive integers"
    return parse


def machine_of(args: argparse.Namespace, platform: Platform) -> Machine:
    """Return the device and settings. Raises UsageError for `--device cuda` without a GPU."""
    kind = platform.device.type if args.device == "auto" else args.device
    if kind == "cuda" and not platform.is_cuda:
        raise UsageError(
            "--device cuda, but torch sees no GPU",
            "",
            "use --device cpu, or a machine with a GPU",
            code="gpu-missing",
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


@returns_exit_code
def main(argv: list[str]) -> int:
    """Run one benchmark, print its table and then its requirement lines, and return the exit code."""
    return run(parser().parse_args(argv), detect(), argv)


def run(args: argparse.Namespace, platform: Platform, argv: list[str]) -> int:
    """Run the benchmark on all processes of torchrun, or of a group that the caller has joined.

    Only rank 0 prints.
    """
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
        if args.csv is not None and speaks:
            append_figures(args.csv, machine.name, argv, report.times, report.others)
        return report.exit_code(args.strict)
    finally:
        if dist.is_initialized() and not joined_before:
            dist.destroy_process_group()


def same_on_all_ranks(value: int, platform: Platform) -> int:
    """Return rank 0's value on all ranks. Collective."""
    tensor = torch.tensor(value, device=platform.device)
    dist.broadcast(tensor, src=0)
    return int(tensor)
