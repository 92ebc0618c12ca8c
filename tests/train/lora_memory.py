"""Measure students with adapters under the memory limit of a small GPU, against the plan.

Models have random weights. The allocator gets a limit, so that a run that does not fit the small GPU fails.
Every adapter must have a gradient.

    python -m tests.train.lora_memory                    # one GPU of 80 GiB, as one of 24 GiB
    python -m tests.train.lora_memory --tiny             # tiny models, also on a CPU: a dry run
"""

from __future__ import annotations

import argparse
import gc
import sys
import time

import numpy as np
import torch

from mkd.platform import detect
from tools.benchmarks.machine import Machine

GIB = 2**30
LORA = ("--lora-rank", "16", "--recompute-granularity", "full", "--recompute-method", "uniform")
LORA = (*LORA, "--recompute-num-layers", "1", "--lr", "1e-4", "--lr-decay-style", "constant")
ARMS = {  # name: student, teacher, flags
    "8B from its base": ("qwen3-8b", "qwen3-8b", ()),
    "4B from 8B, teacher on the host": ("qwen3-4b", "qwen3-8b", ("--teacher-residency", "host")),
    "4B from 8B, teacher in FP8": ("qwen3-4b", "qwen3-8b", ("--teacher-precision", "fp8")),
}
TINY = {
    "tiny, teacher on the host": ("tiny-student", "tiny-teacher", ("--teacher-residency", "host")),
    "tiny from its base": ("tiny-student", "tiny-student", ()),
}


def measure(pair: tuple, args: argparse.Namespace, machine: Machine, context) -> str:
    """Run some steps of one pair; return peak and plan as a line."""
    from mkd.train.step import train_step
    from tools.benchmarks.random_engine import PairSettings, random_engine
    from tools.benchmarks.synthetic_documents import ChatLengths, for_teachers, full_pack

    begin, (student, teacher, flags) = time.perf_counter(), pair
    settings = PairSettings(student, teacher, args.seq_length, kd_ratio=0.5, flags=(*LORA, *flags))
    engine, plan = random_engine(settings, machine, context)
    built_s, random = time.perf_counter() - begin, np.random.default_rng(0)
    lengths = ChatLengths(args.seq_length // 8, args.seq_length // 2)
    pack = full_pack(args.seq_length, plan.student.shape.vocab_size, lengths, random).to(context.device)
    batches = for_teachers([pack], len(engine.teachers))
    sums = [train_step(engine, batches).sums.token_sums()]  # creates the moments
    if machine.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    for _ in range(args.steps):
        sums.append(train_step(engine, batches).sums.token_sums())
    step_ms = 1000 * (time.perf_counter() - begin) / args.steps
    peak = torch.cuda.max_memory_allocated() / GIB if machine.is_cuda else 0.0
    learned = [one for stage in engine.stages for one in stage.parameters() if one.requires_grad]
    assert all(one.main_grad.abs().max() > 0 for one in learned), "an adapter has no gradient"
    planned = plan.forecast.memory.ranks[0].allocated_gib
    losses = ", ".join(f"{one['kd'] / one['num_loss_tokens']:.6g}" for one in (sums[0], sums[-1]))
    return (
        f"built in {built_s:.0f} s, step {step_ms:.0f} ms (planned {plan.forecast.planned_step_ms():.0f}), "
        f"peak {peak:.2f} GiB, planned {planned:.2f}, ratio {peak / planned:.3f}; kd first and last {losses}"
    )


def main(argv: list[str]) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument(
        "--gib", type=float, default=24.0, help="memory limit of the allocator and the context"
    )
    flags.add_argument("--seq-length", type=int, default=4096, help="tokens of a pack")
    flags.add_argument("--steps", type=int, default=4, help="timed steps")
    flags.add_argument("--only", default="", help="arms whose names contain this")
    flags.add_argument("--tiny", action="store_true", help="tiny models")
    args = flags.parse_args(argv)
    platform = detect()
    from tools.benchmarks.random_engine import PairSettings, parallel_context

    if platform.is_cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(args.gib * GIB / total)
    dtype = torch.bfloat16 if platform.is_cuda else torch.float32
    machine = Machine(platform.device, dtype, 1, seed=0, compile=False)
    failed, arms = 0, TINY if args.tiny else ARMS
    with parallel_context(platform, PairSettings("tiny-student", "tiny-teacher", args.seq_length)) as context:
        for name, pair in arms.items():
            if args.only not in name:
                continue
            try:
                line = measure(pair, args, machine, context)
            except torch.OutOfMemoryError as error:
                failed, line = failed + 1, f"does not fit {args.gib:g} GiB: {str(error)[:400]}"
            print(f"{name}: {line}", flush=True)
            gc.collect()
            if platform.is_cuda:
                torch.cuda.empty_cache()
                print(f"  left: {torch.cuda.memory_allocated() / GIB:.2f} GiB", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
