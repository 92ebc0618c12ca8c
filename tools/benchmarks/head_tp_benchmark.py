"""Benchmark the fused head over several ranks: strong scaling against one rank, and collectives per block."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mkd.errors import UsageError
from tools.benchmarks.benchmark_report import Report, Requirement, table
from tools.benchmarks.gate import Errors, relative, worst
from tools.benchmarks.head_case import HeadCase, HeadShape, block_rows_of, mkd_head
from tools.benchmarks.machine import Machine
from tools.benchmarks.measure import Arm, time_arms

COLLECTIVES_PER_CHUNK = {"forward_kl": 1, "jsd": 2}
SAME_SPLIT = {torch.float32: Errors(1e-5, 1e-5), torch.bfloat16: Errors(1e-4, 1e-2)}
"""Differences that another order of sums explains.

Partial hidden gradients are rounded before they are added.
"""
EFFICIENCY = {2: 0.93}  # at tensor-parallel size 2; larger sizes: 0.88


class CollectiveCounter(TorchDispatchMode):
    """Count the collectives that run inside."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += str(function).startswith(("c10d.", "_c10d_functional."))
        return function(*args, **(kwargs or {}))


def benchmark(machine: Machine, shape: HeadShape, block_rows: int | None = None) -> Report:
    """Time the head on 1 / world of the vocabulary per rank, and on all of it for comparison. Collective."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    if shape.vocab % size:
        what = f"a vocabulary of {shape.vocab} does not divide over {size} processes"
        raise UsageError(
            what,
            "every process holds an equal shard",
            "change --shape or the number of processes",
            code="model-not-divisible",
        )
    case = HeadCase(shape, machine)
    width = shape.vocab // size
    shard = slice(rank * width, (rank + 1) * width)
    lines, wrong, rows, measured_times = [], [], [], {}
    for divergence in COLLECTIVES_PER_CHUNK:
        whole = Arm("whole", mkd_head(case, divergence, case.all_rows, block_rows), case.restore)
        split = Arm(
            "split", mkd_head(case, divergence, case.all_rows, block_rows, shard, group), case.restore
        )
        error = _difference(whole, split, shard)
        if not error.within(SAME_SPLIT[machine.dtype]):
            wrong.append(f"mkd {divergence} at TP {size} on rank {rank}")
        times = time_arms([whole, split], machine.device, machine.rounds)
        measured_times[f"{shape}, TP {size}, {divergence}"] = times
        efficiency = times["whole"] / (size * times["split"])
        per_chunk = collectives_per_chunk(case, divergence, shard)
        measured = [f"{times['whole']:.3f}", f"{times['split']:.3f}", f"{efficiency:.3f}", f"{per_chunk:g}"]
        rows.append([divergence, *measured, f"{error.loss:.1e}", f"{error.gradient:.1e}"])
        bound = EFFICIENCY.get(size, 0.88)
        lines.append(
            Requirement(
                "R7", efficiency, f"strong-scaling efficiency at TP {size}, {divergence}", ">=", bound
            )
        )
        limit = COLLECTIVES_PER_CHUNK[divergence]
        lines.append(Requirement("R7", per_chunk, f"collectives per chunk, {divergence}", "<=", limit))
    if rank == 0:
        header = [
            "",
            "one rank, ms",
            f"TP {size}, ms",
            "efficiency",
            "collectives/chunk",
            "loss diff",
            "grad diff",
        ]
        chunks = [block_rows_of(machine, shape, block_rows, ranks) for ranks in (1, size)]
        print(table(f"head {shape} (N,h_s,h_t,V), chunks of {chunks[0]} and {chunks[1]} rows", header, rows))
    return Report(lines, wrong, measured_times)


def _difference(whole: Arm, split: Arm, shard: slice) -> Errors:
    """Return how far the split head is from the whole one.

    Loss and hidden gradient are replicated; the weight's gradient is a shard.
    """
    whole.prepare()
    loss, hidden_gradient, weight_gradient = (tensor.clone() for tensor in whole.run())
    split.prepare()
    split_loss, split_hidden, split_weight = split.run()
    pairs = ((split_hidden, hidden_gradient), (split_weight, weight_gradient[shard]))
    return worst([Errors(relative(split_loss, loss), relative(*pair)) for pair in pairs])


def collectives_per_chunk(case: HeadCase, divergence: str, shard: slice) -> float:
    """Count collectives per block of logits.

    The count of two blocks is subtracted from that of four: collectives that a call needs once cancel, such
    as the reduction of d hidden.
    """
    counts = []
    for chunks in (2, 4):
        run = mkd_head(
            case, divergence, case.all_rows, -(-case.shape.rows // chunks), shard, dist.group.WORLD
        )
        with CollectiveCounter() as counter:
            run()
        counts.append(counter.count)
    return (counts[1] - counts[0]) / 2
