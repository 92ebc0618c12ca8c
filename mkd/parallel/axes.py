"""The axes of the process grid, and the groups of experts spread otherwise than Megatron's.

Experts have a grid of their own over the same ranks: the tensor, context and data-parallel ranks of a
pipeline stage divide the experts (`ep`), and hold copies of them (`edp`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:  # the losses import this module, and do without Megatron on one process
    from megatron.core.process_groups_config import ProcessGroupCollection

# Axis -> field of ProcessGroupCollection that has its group.
AXES = {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp", "ep": "ep", "edp": "expt_dp"}

# Field for experts -> axes of their grid along which the ranks of the group differ.
EXPERT_SPANS: Mapping[str, tuple[str, ...]] = {
    "ep": ("ep",),
    "expt_tp": (),
    "tp_ep": ("ep",),
    "tp_ep_pp": ("ep", "pp"),
    "expt_dp": ("edp",),
    "intra_expt_dp": ("edp",),
}


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
    fields = ((name, getattr(groups, field)) for name, field in AXES.items())
    return {name: Axis(group.rank(), group.size(), group) for name, group in fields}


def grid_groups(sizes: Mapping[str, int], span: Iterable[str]) -> list[list[int]]:
    """Return the ranks of each group that differ along the axes of `span` only.

    `sizes` has all axes of the grid; along the first one neighbours differ by 1.
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


def build_expert_groups(
    groups: ProcessGroupCollection, expert_parallel: int, timeout: timedelta
) -> ProcessGroupCollection:
    """Return `groups` with other groups of experts, over all processes. Collective."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    pipeline_parallel = groups.pp.size()
    copies, rest = divmod(dist.get_world_size(), pipeline_parallel * expert_parallel)
    assert not rest, f"expert parallelism {expert_parallel} does not divide a pipeline stage's processes"
    grid = {"ep": expert_parallel, "edp": copies, "pp": pipeline_parallel}
    created: dict[tuple[str, ...], dist.ProcessGroup] = {}  # fields may share a group
    for field, span in EXPERT_SPANS.items():
        if span not in created:
            ranks = grid_groups(grid, span)
            created[span], _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout, group_desc=field)
    experts = {field: created[span] for field, span in EXPERT_SPANS.items()}
    return ProcessGroupCollection(**vars(groups) | experts)
