"""Benchmark a whole training step: time, MFU, memory, and the cost of distillation beside its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model

from mkd.data.batch import PackedBatch
from mkd.models.packed import packed_documents
from mkd.plan.footprint.memory import predict_memory
from mkd.plan.forecast import PEAK_TFLOPS
from mkd.plan.models.flops import distillation_flops, forward_flops
from mkd.platform import Platform
from mkd.resolve.run_plan import Plan
from mkd.train.layer_graphs import graph_bytes
from mkd.train.step import Engine, train_step
from tools.benchmarks.benchmark_report import Report, Requirement, Skipped, table
from tools.benchmarks.host_times import step_profile
from tools.benchmarks.machine import Machine
from tools.benchmarks.measure import Arm, time_arms
from tools.benchmarks.random_engine import PairSettings, parallel_context, random_engine
from tools.benchmarks.synthetic_documents import ChatLengths, document_lengths, for_teachers, full_pack

KD, SFT, TEACHER = "KD step", "SFT step of the student", "teacher forward"
GIB = 2**30


def benchmark(
    machine: Machine,
    platform: Platform,
    settings: PairSettings,
    lengths: ChatLengths,
    with_profile: bool = False,
) -> Report:
    """Time the step and its parts; print the table on rank 0, and its profiles if asked to. Collective."""
    with parallel_context(platform, settings) as context:
        engine, plan = random_engine(settings, machine, context)
        random = np.random.default_rng(machine.seed + context.dp_rank)
        vocab = min(plan.student.shape.vocab_size, plan.teachers[0].shape.vocab_size)
        batches = [
            full_pack(settings.seq_length, vocab, lengths, random).to(context.device)
            for _ in range(settings.num_microbatches)
        ]
        arms = [Arm(KD, step_of(engine, batches))]
        memory = memory_note(machine, plan, arms[0], engine)
        plain = PairSettings(**{**vars(settings), "kd_ratio": 0.0})
        arms += [Arm(SFT, step_of(random_engine(plain, machine, context)[0], batches))]
        if context.pp_size == 1:
            arms += [Arm(TEACHER, teacher_forward(engine, batches))]
        times = time_arms(arms, machine.device, machine.rounds)
        profiles = [step_profile(arm.run, machine.is_cuda).describe(arm.name) for arm in arms if with_profile]
        flops = _flops(plan, document_lengths(batches))
        gpus = context.world_size // context.dp_size
        tokens = settings.num_microbatches * settings.seq_length
        if context.rank == 0:
            title = f"step {settings.student} <- {settings.teacher}, "
            title += f"{settings.num_microbatches} x {settings.seq_length}"
            rows = [
                [
                    name,
                    f"{ms:.1f}",
                    f"{1000 * tokens / ms / gpus:.0f}",
                    f"{flops[name] / ms / 1e9 / gpus:.3g}",
                ]
                for name, ms in times.items()
            ]
            heads = ["", "ms", "tokens/s/GPU", "TFLOP/s/GPU"]
            print(table(f"{title} tokens", heads, rows), memory, *profiles, sep="\n")
        layout = f"TP {settings.tensor_parallel} PP {settings.pipeline_parallel}, "
        layout += f"{settings.num_microbatches} packs"
        return Report(_requirements(machine, times, flops, gpus), times={layout: times})


def step_of(engine: Engine, batches: Sequence[PackedBatch]) -> Callable[[], object]:
    batches = for_teachers(batches, len(engine.teachers))
    return lambda: train_step(engine, batches)


def teacher_forward(engine: Engine, batches: Sequence[PackedBatch]) -> Callable[[], None]:
    """Return a call that runs the teacher's layers and head on every micro-batch, and drops the logits."""
    (teacher,) = get_attr_wrapped_model(engine.stages[0], "teachers")
    joins = engine.context.platform.transformer_engine

    @torch.no_grad()
    def run() -> None:
        for batch in batches:
            packed = packed_documents(
                batch.cu_seqlens, batch.cu_seqlens_padded, batch.max_seqlen, padding_joins_document=joins
            )
            teacher.logits(teacher(batch.tokens, batch.position_ids, packed_seq_params=packed))

    return run


def _flops(plan: Plan, lengths: list[int]) -> dict[str, int]:
    """Return the FLOPs of one data-parallel replica's step, by arm."""
    student, teacher = plan.student.shape, plan.teachers[0].shape
    return {
        KD: distillation_flops(student, [teacher], lengths),
        SFT: distillation_flops(student, [], lengths),
        TEACHER: forward_flops(teacher, lengths),
    }


def memory_note(machine: Machine, plan: Plan, arm: Arm, engine: Engine) -> str:
    """Measure each pipeline rank's peak in the second step, beside the plan's.

    The first one captures graphs and creates the optimizer state. Tensors of a graph that is replayed are not
    allocated to torch, so what graphs keep is added.
    """
    if not machine.is_cuda:
        return "peak memory: measured on GPUs only"
    arm.run()
    torch.cuda.reset_peak_memory_stats()
    arm.run()
    context = engine.context
    peak = torch.cuda.max_memory_allocated() + graph_bytes(engine.stages)
    measured: list = [None] * context.world_size
    dist.all_gather_object(measured, (context.pp_rank, peak / GIB))
    planned = predict_memory(plan.facts)
    lines = []
    for rank, memory in enumerate(planned.ranks):
        peak, predicted = max(gib for owner, gib in measured if owner == rank), memory.allocated_gib
        lines.append(
            f"peak memory of pipeline rank {rank}: {peak:.2f} GiB, predicted {predicted:.2f}: "
            f"ratio {peak / predicted:.3f}"
        )
    return "\n".join(lines)


def _requirements(machine: Machine, times: dict, flops: dict, gpus: int) -> list[Requirement | Skipped]:
    rate = {name: flops[name] / times[name] for name in (KD, SFT)}
    lines: list[Requirement | Skipped] = [
        Requirement("R10", rate[KD] / rate[SFT], "of the SFT step's MFU", ">=", 0.95)
    ]
    if TEACHER in times:
        parts = times[TEACHER] + times[SFT]
        lines.append(Requirement("R10", times[KD] / parts, "of teacher forward + SFT step", "<=", 1.05))
    else:
        lines.append(
            Skipped("R10", "teacher forward + SFT step: the teacher's forward alone needs one pipeline stage")
        )
    if machine.is_cuda:
        mfu = rate[KD] / 1e9 / gpus / PEAK_TFLOPS
        return [*lines, Requirement("R10", mfu, "MFU of the KD step", ">=", 0.50)]
    return [*lines, Skipped("R10", "MFU of the KD step: a CPU has no published peak")]
