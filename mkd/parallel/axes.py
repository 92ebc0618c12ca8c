"""The axes of the process grid and the process groups that follow from them.

Another axis (expert parallelism) is one entry in `AXES` and the spans of its groups in `SPANS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

# Axis -> what it divides, in Megatron's order of ranks: along the first axis neighbours differ by 1.
AXES = {"tp": "every matrix", "cp": "every sequence", "dp": "the batch", "pp": "the layers"}

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
    # Dense models have one expert, so its groups are those of the other weights.
    "ep": (),
    "expt_tp": ("tp",),
    "tp_ep": ("tp",),
    "tp_ep_pp": ("tp", "pp"),
    "expt_dp": ("cp", "dp"),
    "intra_expt_dp": ("cp", "dp"),
    "intra_dist_opt": ("tp", "cp", "dp", "pp"),
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


def axes_of(groups: ProcessGroupCollection) -> dict[str, Axis]:
    """Return this process's place on every axis."""
    return {
        name: Axis(group.rank(), group.size(), group)
        for name, group in ((name, getattr(groups, name)) for name in AXES)
    }


def grid_groups(sizes: Mapping[str, int], span: Iterable[str]) -> list[list[int]]:
    """Return the ranks of each group that differ along the axes of `span` only. `sizes` has all axes."""
    strides, stride = {}, 1
    for name in AXES:
        strides[name] = stride
        stride *= sizes[name]
    spanned = set(span)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(stride):
        fixed = tuple(rank // strides[name] % sizes[name] for name in AXES if name not in spanned)
        groups.setdefault(fixed, []).append(rank)
    return list(groups.values())


def build_groups(sizes: Mapping[str, int], timeout: timedelta) -> ProcessGroupCollection:
    """Create the groups of a grid with the `sizes` of all axes, over all processes. Collective.

    A process that is in no group of a field (an inner pipeline stage for `embd`) has None there, as in
    Megatron.
    """
    assert math.prod(sizes[name] for name in AXES) == dist.get_world_size(), "the axes span the world"
    members = {field: grid_groups(sizes, span) for field, span in SPANS.items()}
    for field, stages in STAGES.items():
        members[field] = [sorted({ranks[stage] for stage in stages}) for ranks in members["pp"]]
    groups: dict[str, dist.ProcessGroup | None] = dict.fromkeys(ABSENT)
    built: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}  # fields may share a group
    for field, lists in members.items():
        key = tuple(map(tuple, lists))
        if key not in built:
            built[key], _ = dist.new_subgroups_by_enumeration(lists, timeout=timeout, group_desc=field)
        groups[field] = built[key]
    return ProcessGroupCollection(**groups)
