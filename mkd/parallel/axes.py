"""The axes of the process grid and the process groups that follow from them.

Another axis is one entry in `AXES` and the spans of its groups in `SPANS`. Experts have a grid of their own
over the same ranks: the tensor, context and data-parallel ranks of a pipeline stage divide the experts
(`ep`), and hold copies of them (`edp`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from mkd.plan.parallel_sizes import Sizes

if TYPE_CHECKING:  # the losses import this module, and do without Megatron on one process
    from megatron.core.process_groups_config import ProcessGroupCollection

# Axis -> what it divides, in Megatron's order of ranks: along the first axis neighbours differ by 1.
AXES = {"tp": "every matrix", "cp": "every sequence", "dp": "the batch", "pp": "the layers"}

# The same for experts; an expert is whole on its process.
EXPERT_AXES = {"ep": "the experts", "edp": "copies of the experts", "pp": "the layers"}

# Field of ProcessGroupCollection -> axes along which the ranks of the group differ.
SPANS: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "mp": ("tp", "pp"),
    "tp_cp": ("tp", "cp"),
    "dp_cp": ("cp", "dp"),
    "intra_dp_cp": ("cp", "dp"),
    "tp_dp_cp": ("tp", "cp", "dp"),
    "intra_dist_opt": ("tp", "cp", "dp", "pp"),
}
EXPERT_SPANS: Mapping[str, tuple[str, ...]] = {
    "ep": ("ep",),
    "expt_tp": (),
    "tp_ep": ("ep",),
    "tp_ep_pp": ("ep", "pp"),
    "expt_dp": ("edp",),
    "intra_expt_dp": ("edp",),
}
# Field -> positions in a pipeline group of the stages that share the embedding.
STAGES: Mapping[str, tuple[int, ...]] = {"embd": (0, -1), "pos_embd": (0,)}
ABSENT = ("hcp", "inter_dist_opt")  # hierarchical context parallelism, several optimizer instances


@dataclass(frozen=True)
class Axis:
    """One dimension of the process grid, as one process sees it."""

    rank: int
    size: int
    group: dist.ProcessGroup | None  # None: the process communicates with no other


@dataclass(frozen=True)
class NoOthers:
    """In place of a group that has this process alone.

    Megatron's and mkd's layers ask a group for its size, and then communicate with nobody.
    """

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return (rank, size) in a group; (0, 1) without one."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def axes_of(groups: ProcessGroupCollection) -> dict[str, Axis]:
    """Return this process's place on every axis."""
    fields = {name: name for name in AXES} | {"ep": "ep", "edp": "expt_dp"}
    return {
        name: Axis(group.rank(), group.size(), group)
        for name, group in ((name, getattr(groups, field)) for name, field in fields.items())
    }


def grid_groups(sizes: Mapping[str, int], span: Iterable[str]) -> list[list[int]]:
    """Return the ranks of each group that differ along the axes of `span` only.

    `sizes` has all axes of `AXES` or `EXPERT_AXES`, in their order.
    """
    strides, stride = {}, 1
    for name, size in sizes.items():
        strides[name] = stride
        stride *= size
    spanned = set(span)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(stride):
        fixed = tuple(rank // strides[name] % sizes[name] for name in sizes if name not in spanned)
        groups.setdefault(fixed, []).append(rank)
    return list(groups.values())


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


def build_groups(sizes: Sizes, timeout: timedelta) -> ProcessGroupCollection:
    """Create the groups of a grid over all processes. Collective.

    A process that is in no group of a field (an inner pipeline stage for `embd`) has None there, as in
    Megatron.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    grid = dict(zip(AXES, (sizes.tensor, sizes.context, sizes.data, sizes.pipeline), strict=True))
    assert math.prod(grid.values()) == dist.get_world_size(), "the axes span the world"
    members = {field: grid_groups(grid, span) for field, span in SPANS.items()}
    members |= _expert_members(sizes.pipeline, sizes.expert)
    for field, stages in STAGES.items():
        members[field] = [sorted({ranks[stage] for stage in stages}) for ranks in members["pp"]]
    return ProcessGroupCollection(**dict.fromkeys(ABSENT), **_create(members, timeout))


def build_expert_groups(
    groups: ProcessGroupCollection, expert_parallel: int, timeout: timedelta
) -> ProcessGroupCollection:
    """Return `groups` with other groups of experts, over all processes. Collective."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    members = _expert_members(groups.pp.size(), expert_parallel)
    return ProcessGroupCollection(**vars(groups) | _create(members, timeout))


def _expert_members(pipeline_parallel: int, expert_parallel: int) -> dict[str, list[list[int]]]:
    """Return the ranks of all groups of experts, by field."""
    copies, rest = divmod(dist.get_world_size(), pipeline_parallel * expert_parallel)
    assert not rest, f"expert parallelism {expert_parallel} does not divide a pipeline stage's processes"
    sizes = {"ep": expert_parallel, "edp": copies, "pp": pipeline_parallel}
    return {field: grid_groups(sizes, span) for field, span in EXPERT_SPANS.items()}


def _create(
    members: Mapping[str, list[list[int]]], timeout: timedelta
) -> dict[str, dist.ProcessGroup | None]:
    """Create the groups with these ranks, by field. Collective."""
    groups: dict[str, dist.ProcessGroup | None] = {}
    built: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}  # fields may share a group
    for field, lists in members.items():
        key = tuple(map(tuple, lists))
        if key not in built:
            built[key], _ = dist.new_subgroups_by_enumeration(lists, timeout=timeout, group_desc=field)
        groups[field] = built[key]
    return groups
