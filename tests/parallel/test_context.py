"""Groups and ranks of the parallel grid, on the CPU platform."""

from __future__ import annotations

from mkd.parallel.context import ParallelContext
from mkd.platform import detect


def grid(tp, pp):
    context = ParallelContext.create(detect(), tensor_parallel=tp, pipeline_parallel=pp)
    shared = context.broadcast_object({"rank": context.rank})
    return context.tp_rank, context.pp_rank, context.dp_rank, context.dp_size, shared


def test_megatron_grid_order(ranks):
    results = ranks.run(grid, 8, 2, 2)
    assert [r[:3] for r in results] == [
        (tp, pp, dp) for pp in range(2) for dp in range(2) for tp in range(2)
    ]
    assert all(r[3] == 2 and r[4] == {"rank": 0} for r in results)


def test_one_process(ranks):
    assert ranks.run(grid, 1, 1, 1) == [(0, 0, 0, 1, {"rank": 0})]
