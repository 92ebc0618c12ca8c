"""Run one benchmark from its flags: the defaults of this machine, and the call of the benchmark."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mkd.platform import detect
from tools.benchmarks.benchmark_report import Report, merge
from tools.benchmarks.machine import Machine, ceilings

if TYPE_CHECKING:
    from tools.benchmarks.random_engine import PairSettings
    from tools.benchmarks.synthetic_documents import ChatLengths


def run_ceilings(args: argparse.Namespace, machine: Machine) -> Report:
    return ceilings(machine)


def run_logits(args: argparse.Namespace, machine: Machine) -> Report:
    from tools.benchmarks.logits_benchmark import benchmark

    if machine.compile:
        compile_every_shape()
    shapes = args.shape or [(8192, 151936) if machine.is_cuda else (256, 32000)]
    return merge([benchmark(machine, rows, vocab) for rows, vocab in shapes])


def run_head(args: argparse.Namespace, machine: Machine) -> Report:
    from tools.benchmarks import head_benchmark, head_tp_benchmark
    from tools.benchmarks.head_case import HeadShape

    if machine.compile:
        compile_every_shape()
    shapes = args.shape or [(8192, 2048, 4096, 151936) if machine.is_cuda else (256, 64, 96, 8000)]
    benchmark = head_tp_benchmark.benchmark if is_parallel() else head_benchmark.benchmark
    return merge([benchmark(machine, HeadShape(*shape), args.block_rows) for shape in shapes])


def run_library(args: argparse.Namespace, machine: Machine) -> Report:
    from tools.benchmarks.head_case import HeadShape
    from tools.benchmarks.library_benchmark import benchmark

    if machine.compile:
        compile_every_shape()
    shapes = args.shape or [(8192, 2048, 4096, 151936) if machine.is_cuda else (256, 64, 96, 8000)]
    return merge([benchmark(machine, HeadShape(*shape)) for shape in shapes])


def run_step(args: argparse.Namespace, machine: Machine) -> Report:
    from tools.benchmarks.step_benchmark import benchmark

    return benchmark(machine, detect(), pair_settings(args, machine), chat_lengths(machine), args.profile)


def run_graphs(args: argparse.Namespace, machine: Machine) -> Report:
    from tools.benchmarks.graph_benchmark import BOTH, EAGER, TEACHER, Forced, benchmark

    only = {"without": EAGER, "teacher": TEACHER, "both": BOTH, None: None}[args.only]
    is_forced = args.experts is not None or args.most_layers is not None
    forced = Forced(args.experts == "between", args.most_layers) if is_forced else None
    settings = replace(pair_settings(args, machine), teacher_seed=args.teacher_seed)
    return benchmark(machine, detect(), settings, chat_lengths(machine), forced, only)


def run_layouts(args: argparse.Namespace, machine: Machine) -> Report:
    from tools.benchmarks.layout_benchmark import benchmark
    from tools.benchmarks.layout_words import arm_of

    arms, settings = [arm_of(text) for text in args.layouts], pair_settings(args, machine)
    settings = replace(settings, num_microbatches=args.packs)
    return benchmark(machine, detect(), settings, arms, chat_lengths(machine), args.profile)


def run_decode(args: argparse.Namespace, machine: Machine) -> Report:
    from tools.benchmarks.decode_benchmark import DecodeCase, benchmark

    default = (256, 128, 512) if machine.is_cuda else (4, 16, 24)
    given = args.batch, args.prompt_tokens, args.new_tokens
    case = DecodeCase(*(value or other for value, other in zip(given, default, strict=True)))
    return benchmark(machine, detect(), pair_settings(args, machine), case)


def run_experts(args: argparse.Namespace, machine: Machine) -> Report:
    """Spread the experts over all processes."""
    from tools.benchmarks.expert_benchmark import benchmark
    from tools.benchmarks.random_engine import PairSettings

    student, teachers, length = "tiny-moe", ["tiny-teacher", "tiny-moe"], 256
    if machine.is_cuda:
        student, teachers, length = "qwen3-30b-a3b", ["qwen3-8b:8", "qwen3-235b-a22b:2"], 8192
    teachers = args.teacher_shapes or teachers
    processes = dist.get_world_size() if is_parallel() else 1
    spread = ("--expert-model-parallel-size", str(processes), "--use-distributed-optimizer")
    settings = PairSettings(
        args.student_shape or student,
        teachers[0],
        args.seq_length or length,
        micro_batch_size=args.packs,
        num_microbatches=args.microbatches,
        flags=(*(spread if processes > 1 else ()), *args.flags.split()),
    )
    fits = args.memory_fraction if machine.is_cuda and args.student_shape is None else None
    return benchmark(machine, detect(), settings, teachers, chat_lengths(machine), fits, args.kernels)


def run_mixer(args: argparse.Namespace, machine: Machine) -> Report:
    from tools.benchmarks.mixer_benchmark import benchmark

    args.student_shape = args.student_shape or ("qwen3.5-2b" if machine.is_cuda else "tiny-delta")
    args.teacher_shape = args.teacher_shape or ("qwen3.5-9b" if machine.is_cuda else "tiny-delta")
    settings, lengths = pair_settings(args, machine), chat_lengths(machine)
    return benchmark(machine, detect(), settings, lengths, tuple(args.parts), args.kernels)


def run_trainers(args: argparse.Namespace, machine: Machine) -> Report:
    from tools.benchmarks.synthetic_documents import ChatLengths
    from tools.benchmarks.trainers_benchmark import benchmark

    documents = args.documents or (64 if machine.is_cuda else 16)
    lengths = chat_lengths(machine)
    if args.document_length:
        lengths = ChatLengths(args.document_length, args.document_length, spread=0.0)
    settings = pair_settings(args, machine)
    return benchmark(machine, detect(), settings, lengths, documents, args.padded)


def run_corpus(args: argparse.Namespace, machine: Machine) -> Report:
    from tools.benchmarks.corpus_benchmark import benchmark

    return benchmark(args.documents, args.seq_length, args.workers, args.folder, args.loss_mask, machine.seed)


def run_pipeline(args: argparse.Namespace, machine: Machine) -> Report:
    from tools.benchmarks.pipeline_benchmark import benchmark

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
    """Return True if torchrun has started several processes."""
    return dist.is_initialized() and dist.get_world_size() > 1


def compile_every_shape() -> None:
    """Compile code for every shape and block size.

    By default torch soon generalises or gives up, and peers suffer. Use it only for losses: with padded
    documents the engine meets too many lengths to compile for each.
    """
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.recompile_limit = 64
