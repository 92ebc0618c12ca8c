"""Check groups and ranks of the parallel grid, on the CPU platform."""

from __future__ import annotations

import pytest
import torch
from megatron.core import parallel_state

from mkd.parallel.axes import AXES, Axis
from mkd.parallel.context import ParallelContext
from mkd.plan.parallel_sizes import Sizes
from mkd.platform import detect


def grid(tp, pp):
    context = ParallelContext.create(detect(), Sizes(tensor=tp, pipeline=pp))
    shared = context.broadcast_object({"rank": context.rank})
    return context.tp_rank, context.pp_rank, context.dp_rank, context.dp_size, shared


@pytest.mark.slow  # eight processes
def test_megatron_grid_order(ranks):
    results = ranks.run(grid, 8, 2, 2)
    assert [r[:3] for r in results] == [(tp, pp, dp) for pp in range(2) for dp in range(2) for tp in range(2)]
    assert all(r[3] == 2 and r[4] == {"rank": 0} for r in results)


def context_grid():
    context = ParallelContext.create(detect(), Sizes(tensor=2, context=2))
    groups = (context.groups.cp, context.dp_group, context.copies_group)
    return (
        context.tp_rank,
        context.cp_rank,
        context.dp_rank,
        [torch.distributed.get_process_group_ranks(g) for g in groups],
    )


@pytest.mark.slow
def test_context_parallel_ranks_are_neighbours_within_a_replica(ranks):
    results = ranks.run(context_grid, 8)
    assert [r[:3] for r in results] == [(tp, cp, dp) for dp in range(2) for cp in range(2) for tp in range(2)]
    assert results[3][3] == [[1, 3], [3, 7], [1, 3, 5, 7]]


def numbers_of_groups(has_gloo_too):
    """Return how many groups there are within a context, and after it, twice.

    `has_gloo_too`: also those that Megatron makes on GPUs alone, and destroys itself.
    """
    counts, initialize = [], parallel_state.initialize_model_parallel

    def as_asked(*args, **options):
        return initialize(*args, **options | ({"create_gloo_process_groups": True} if has_gloo_too else {}))

    parallel_state.initialize_model_parallel = as_asked
    for _ in range(2):
        context = ParallelContext.create(detect(), Sizes(tensor=2))
        counts.append(len(torch.distributed.distributed_c10d._world.pg_map))
        context.close()
        counts.append(len(torch.distributed.distributed_c10d._world.pg_map))
    parallel_state.initialize_model_parallel = initialize
    return counts


@pytest.mark.parametrize("has_gloo_too", [False, True], ids=["as on CPUs", "as on GPUs"])
def test_a_closed_context_leaves_no_group(has_gloo_too, ranks):
    for first, after, again, at_last in ranks.run(numbers_of_groups, 2, has_gloo_too):
        assert first == again > 2 and after == at_last == 1, "that of all processes"


def test_one_process(ranks):
    assert ranks.run(grid, 1, 1, 1) == [(0, 0, 0, 1, {"rank": 0})]


@pytest.mark.parametrize(
    ("place", "first_replica", "multiple", "shards"),
    [
        ({}, True, 1, (1, 1)),
        ({"tp": (1, 2)}, True, 1, (1, 2)),
        ({"dp": (1, 2), "tp": (0, 4)}, False, 1, (1, 4)),
        ({"cp": (1, 2), "tp": (0, 4)}, False, 4, (2, 8)),
        ({"cp": (0, 3), "pp": (1, 2)}, True, 6, (3, 3)),
    ],
)
def test_what_follows_from_the_axes(place, first_replica, multiple, shards):
    axes = {name: Axis(*place.get(name, (0, 1)), None) for name in AXES}
    context = ParallelContext(detect(), 0, 1, axes, 1, None)
    assert context.is_first_replica == first_replica
    assert context.document_multiple == multiple
    assert tuple(context.sequence_shards(parallel) for parallel in (False, True)) == shards
    assert (context.tp_rank, context.tp_size) == (context.tp.rank, context.tp.size)
