"""Check the groups of experts that follow from the axes against Megatron's."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from mkd.parallel.axes import AXES, EXPERT_SPANS, grid_groups
from mkd.parallel.context import ParallelContext
from mkd.plan.parallel_sizes import Sizes
from mkd.platform import detect

LAYOUTS_OF_4 = (
    Sizes(tensor=2, pipeline=2),
    Sizes(context=2, tensor=2),
    Sizes(pipeline=4),
    Sizes(context=2),
    Sizes(expert=4),
    Sizes(expert=2, tensor=2),
    Sizes(expert=2, pipeline=2),
)


def test_every_group_is_one_of_megatron():
    theirs = {field.name for field in fields(ProcessGroupCollection)}
    assert {*EXPERT_SPANS, *AXES.values()} <= theirs
    assert {axis for span in EXPERT_SPANS.values() for axis in span} == {"ep", "edp", "pp"}


def test_grid_groups_by_hand():
    sizes = {"tp": 2, "cp": 1, "dp": 3, "pp": 2}
    assert grid_groups(sizes, ["tp"]) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert grid_groups(sizes, ["dp"]) == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert grid_groups(sizes, ["tp", "pp"]) == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert grid_groups(sizes, []) == [[rank] for rank in range(12)]


def members(context: ParallelContext) -> dict[str, list[int]]:
    """Return the global ranks of each group of experts of a context, by field."""
    groups = {field: getattr(context.groups, field) for field in EXPERT_SPANS}
    return {field: dist.get_process_group_ranks(group) for field, group in groups.items()}


def members_and_places(layout: Sizes, expert_parallel: int) -> tuple[dict, dict]:
    """Return the groups and places at `layout`, with the experts spread otherwise after it is built."""
    built = ParallelContext.create(detect(), layout)
    context = built.with_expert_parallel(expert_parallel, timeout_minutes=1)
    places = {name: (axis.rank, axis.size) for name, axis in context.axes.items()}
    found = members(context), places
    if context is not built:
        for group in {
            id(one): one for one in (getattr(context.groups, name) for name in EXPERT_SPANS)
        }.values():
            dist.destroy_process_group(group)
    built.close()
    return found


@pytest.mark.parametrize("layout", LAYOUTS_OF_4, ids=str)
def test_groups_of_experts_are_those_of_megatron(layout, ranks):
    expected = ranks.run(members_and_places, 4, layout, layout.expert)
    largest = 4 // layout.pipeline
    start = replace(layout, expert=1 if layout.expert > 1 else largest)
    assert start.expert != layout.expert or largest == 1
    assert ranks.run(members_and_places, 4, start, layout.expert) == expected
