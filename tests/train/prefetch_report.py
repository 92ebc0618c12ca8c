"""Report teacher forwards ahead of the student on a pipeline: step over the ideal, and a long run.

    torchrun --nproc-per-node 2 -m tests.train.prefetch_report                  # two GPUs, two stages
    torchrun --nproc-per-node 4 -m tests.train.prefetch_report --microbatches 8 # four
    torchrun --nproc-per-node 2 -m tests.train.prefetch_report --endure 1000    # tiny models, many steps
    torchrun --nproc-per-node 2 -m tests.train.prefetch_report --tiny           # rehearsal

A step is forward and backward of all micro-batches, without update. A whole step before creates the moments,
which the plan counts. The ideal is the own time of all stages on one micro-batch x micro-batches / ranks.
`--endure` trains, and compares the first steps with those without forwards ahead, bit for bit.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist

from mkd.platform import detect, make_deterministic
from tests.plan.held_bytes import optimizer_bytes
from tools.benchmarks.machine import Machine
from tools.benchmarks.measure import Arm, time_arms

GIB = 2**30
TINY = "tiny-student", "tiny-teacher", 256
COMPARED = 20  # steps


def engine_of(args: argparse.Namespace, microbatches: int, ahead: int, machine: Machine, context):
    """Return (engine, plan, equal micro-batches)."""
    from tools.benchmarks.random_engine import PairSettings, random_engine
    from tools.benchmarks.synthetic_documents import ChatLengths, for_teachers, full_pack

    flags = ("--teacher-prefetch", str(ahead), "--pipeline-layout", "auto", *args.flags.split())
    flags = ("--lr", "1e-4", "--lr-decay-style", "constant", *flags) if args.endure else flags
    stages = dict(pipeline_parallel=context.pp_size)
    settings = PairSettings(
        args.student, args.teacher, args.seq_length, 1, microbatches, **stages, flags=flags
    )
    engine, plan = random_engine(settings, machine, context)
    vocab = min(plan.student.shape.vocab_size, plan.teachers[0].shape.vocab_size)
    lengths = ChatLengths(max(2, args.seq_length // 8), args.seq_length // 2)
    random = np.random.default_rng(0)
    packs = [full_pack(args.seq_length, vocab, lengths, random) for _ in range(microbatches)]
    packs = packs if args.endure else packs[:1] * microbatches  # equal work, as the simulation assumes
    return engine, plan, for_teachers([pack.to(context.device) for pack in packs], 1)


def require_state(engine, planned_gib: float) -> None:
    """Raise AssertionError unless this rank holds the optimizer's state that the plan counts."""
    held_gib = optimizer_bytes(engine.optimizer.optimizer) / GIB
    assert abs(held_gib / planned_gib - 1) < 0.02, f"state of {held_gib:.2f} GiB, planned {planned_gib:.2f}"


def compare(args: argparse.Namespace, machine: Machine, context) -> None:
    """Print step over ideal for every number of micro-batches, without forwards ahead and with them."""
    from mkd.train.layer_graphs import graph_bytes
    from mkd.train.step import train_step, training_objective
    from tools.benchmarks.pipeline_benchmark import _stage_times

    for microbatches in args.microbatches:
        ideal_ms = None
        for ahead in (0, 2 * context.pp_size):
            engine, plan, batches = engine_of(args, microbatches, ahead, machine, context)
            train_step(engine, batches)
            if machine.is_cuda:  # what was allocated while graphs were captured counts once
                torch.cuda.reset_peak_memory_stats()
            memory = plan.forecast.memory.ranks[context.pp_rank]
            require_state(engine, memory.optimizer_gib)
            objective = training_objective(engine, batches)

            def run(engine=engine, batches=batches, objective=objective) -> None:
                more = dict(forward_only=False, following=batches)
                engine.schedule.run(engine.stages, batches, objective, **more)

            step_ms = time_arms([Arm("step", run)], machine.device, args.rounds)["step"]
            forecast = plan.forecast
            planned_ms, planned_ideal_ms = forecast.pipeline_ms(), forecast.step.ideal_ms
            if ahead == 0:
                stage_ms = _stage_times(machine, engine, plan, batches[0], objective)
                ideal_ms = microbatches * sum(stage_ms) / context.pp_size
                balance = max(stage_ms) * len(stage_ms) / sum(stage_ms)
            peak = torch.cuda.max_memory_allocated() + graph_bytes(engine.stages) if machine.is_cuda else 0
            peak /= GIB
            peaks = [None] * context.world_size
            planned = memory.allocated_gib
            dist.all_gather_object(peaks, f"{peak:.2f} GiB (plan {planned:.2f}, ratio {peak / planned:.3f})")
            if context.rank == 0:
                print(
                    f"m = {microbatches}, N = {ahead}: step {step_ms:.1f} ms, {step_ms / ideal_ms:.3f} x the "
                    f"ideal {ideal_ms:.1f}; simulated {planned_ms / planned_ideal_ms:.3f}; slowest stage "
                    f"{balance:.3f} of the mean, layers {plan.facts.layouts.student.layers} and "
                    f"{plan.facts.layouts.teachers[0].layers}; peaks {', '.join(map(str, peaks))}",
                    flush=True,
                )
            del engine, objective, run, batches
            gc.collect()
            if machine.is_cuda:
                torch.cuda.empty_cache()


def endure(args: argparse.Namespace, machine: Machine, context) -> int:
    """Train many steps with forwards ahead. Return 1 if the first ones differ from those without."""
    from mkd.train.step import train_step

    expected: list = []
    (microbatches, *_) = args.microbatches
    for ahead, steps in ((0, min(COMPARED, args.endure)), (2 * context.pp_size, args.endure)):
        engine, _, batches = engine_of(args, microbatches, ahead, machine, context)
        orders = [batches[i:] + batches[:i] for i in range(microbatches)]
        found, begin = [], time.perf_counter()
        for step in range(steps):
            following = orders[(step + 1) % microbatches] if step + 1 < steps else ()
            result = train_step(engine, orders[step % microbatches], following=following)
            found.append((result.sums.token_sums()["loss"], result.grad_norm))
            if context.rank == 0 and step + 1 in (1, 20, 50, *range(100, steps + 1, 100)):
                ms = 1000 * (time.perf_counter() - begin) / (step + 1)
                print(f"N = {ahead}: {step + 1} steps, {ms:.1f} ms each, loss {found[-1][0]:.6g}", flush=True)
        expected = expected or found
    is_same = found[: len(expected)] == expected
    if context.rank == 0:
        connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset")
        bits = "the same bits as" if is_same else "OTHER BITS THAN"
        print(
            f"{args.endure} steps without a hang, CUDA_DEVICE_MAX_CONNECTIONS {connections}; the first "
            f"{len(expected)} have {bits} without forwards ahead",
            flush=True,
        )
    return int(not is_same)


def main(argv: list[str]) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--student", default="qwen3-1.7b", help="shape in tools/benchmarks/shapes.py")
    flags.add_argument("--teacher", default="qwen3-8b", help="shape in tools/benchmarks/shapes.py")
    flags.add_argument("--seq-length", type=int, default=8192, help="tokens of a micro-batch")
    flags.add_argument("--microbatches", type=int, nargs="+", default=[4, 8], help="micro-batches of a step")
    flags.add_argument("--rounds", type=int, default=5, help="timed steps")
    flags.add_argument("--flags", default="", help="more flags of pretrain_kd.py")
    flags.add_argument("--endure", type=int, default=0, help="train so many steps instead, with tiny models")
    flags.add_argument("--tiny", action="store_true", help="use tiny models")
    args = flags.parse_args(argv)
    if args.endure or args.tiny:
        args.student, args.teacher, args.seq_length = TINY
    if args.endure:
        make_deterministic()
    platform = detect()
    from tools.benchmarks.random_engine import PairSettings, parallel_context

    dtype = torch.bfloat16 if platform.is_cuda else torch.float32
    machine = Machine(platform.device, dtype, args.rounds, seed=0, compile=False)
    stages = int(os.environ.get("WORLD_SIZE", "1"))
    settings = PairSettings(args.student, args.teacher, args.seq_length, pipeline_parallel=stages)
    with parallel_context(platform, settings) as context:
        if args.endure:
            return endure(args, machine, context)
        compare(args, machine, context)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
