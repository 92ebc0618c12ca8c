"""Which processes split a teacher's layers among them: `--teacher-residency peers`."""

from __future__ import annotations

import math


def weight_shards(tensor_parallel: int, expert_parallel: int) -> int:
    """Return how many consecutive processes hold different weights of a model (1 for experts: it has none).

    Processes with the same tensor-parallel and the same expert-parallel rank hold the same weights. Both
    ranks count from the first process of a pipeline stage: Megatron counts ranks along tensor, context, data,
    then pipeline parallelism, and for experts along expert parallelism first.
    """
    return math.lcm(tensor_parallel, expert_parallel)


def peer_ranks(world_size: int, shards: int, peers: int) -> list[list[int]]:
    """Return the ranks of each group of `peers` processes that hold the same weights.

    They are the nearest ones. `shards` x `peers` divides the processes of a pipeline stage.
    """
    block = shards * peers
    return [
        list(range(first + shard, first + block, shards))
        for first in range(0, world_size, block)
        for shard in range(shards)
    ]
