"""DTensors: their part on this process, and heads that are sharded over processes with other data.

A mesh dimension is the vocabulary's if its processes are those of the loss's `tp_group`. Every other one
spans processes that have rows of their own, as in FSDP2: a shard there is gathered for the call, and the
gradient that comes back is the mean over those processes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from mkd.errors import UsageError
from mkd.losses.differentiable_once import differentiable_once


def vocabulary_dimension(tensor: DTensor, tp_group: dist.ProcessGroup | None) -> int | None:
    """Return the mesh dimension over which the vocabulary is split; None if `tp_group` is none of them."""
    if tp_group is None:
        return None
    ranks = dist.get_process_group_ranks(tp_group)
    for index in range(tensor.device_mesh.ndim):
        if dist.get_process_group_ranks(tensor.device_mesh.get_group(index)) == ranks:
            return index
    return None


def is_split(tensor: DTensor, tp_group: dist.ProcessGroup | None, dimension: int) -> bool:
    """Return True if the tensor's `dimension` is sharded over `tp_group`."""
    index = vocabulary_dimension(tensor, tp_group)
    return index is not None and tensor.placements[index].is_shard(dimension % tensor.ndim)


def own_part(tensor: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
    """Return this process's rows of a head: a vocabulary shard stays, other shards are gathered.

    The result is differentiable. Communication: an all-gather over the processes with other rows, and in
    backward a reduce-scatter.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    kept = vocabulary_dimension(tensor, tp_group)
    others = [p for index, p in enumerate(tensor.placements) if index != kept]
    if kept is not None and not all(placement.is_replicate() for placement in others):
        raise UsageError(
            f"an LM head has the placements {tensor.placements}",
            "it is sharded over tp_group and over processes with other data at once",
            "call `unshard()` of its FSDP module before the loss",
            code="layout-not-valid",
        )
    if kept is not None and tensor.device_mesh.ndim == 1:
        return tensor.to_local()
    return _OwnPart.apply(tensor, kept)


class _OwnPart(torch.autograd.Function):
    """DTensor -> local tensor; the gradient is the mean over processes with other rows."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, kept: int | None) -> Tensor:
        ctx.mesh, ctx.placements, ctx.kept = tensor.device_mesh, tensor.placements, kept
        ctx.shape, ctx.stride = tensor.shape, tensor.stride()
        wanted = [p if index == kept else Replicate() for index, p in enumerate(tensor.placements)]
        return tensor.redistribute(placements=wanted).to_local()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        kept: int | None = ctx.kept
        others = [size for index, size in enumerate(ctx.mesh.shape) if index != kept]
        mean = gradient / torch.Size(others).numel()
        partial = [p if index == kept else Partial() for index, p in enumerate(ctx.placements)]
        layout: dict[str, Any] = dict(run_check=False, shape=ctx.shape, stride=ctx.stride)
        whole = DTensor.from_local(mean.contiguous(), ctx.mesh, partial, **layout)
        return whole.redistribute(placements=ctx.placements), None


def whole(tensor: Tensor) -> Tensor:
    """Return a frozen tensor in full."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_rows(hidden: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
    """Return hidden states in full on every process of `tp_group`; other tensors as they are.

    The gradient that comes back is the same on all of them. Raises UsageError for a DTensor over others.
    """
    if not isinstance(hidden, DTensor):
        return hidden
    require_mesh(hidden, tp_group, "hidden states are")
    return hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])


def own_columns(logits: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
    """Return this process's columns of logits. Raises UsageError for a DTensor over other processes."""
    if not isinstance(logits, DTensor):
        return logits
    require_mesh(logits, tp_group, "logits are")
    last = Shard(logits.ndim - 1)
    if tuple(logits.placements) != (last,):
        raise UsageError(
            f"logits have the placements {logits.placements}",
            "with tp_group the loss reads this process's columns",
            "redistribute them to Shard(-1), or give hidden states and heads",
            code="layout-not-valid",
        )
    return logits.to_local()


def require_mesh(tensor: DTensor, tp_group: dist.ProcessGroup | None, what: str) -> None:
    """Raise UsageError unless the mesh of `tensor` is `tp_group`."""
    if tensor.device_mesh.ndim == 1 and vocabulary_dimension(tensor, tp_group) == 0:
        return
    raise UsageError(
        f"{what} a DTensor over the mesh {tensor.device_mesh}",
        "the loss knows only how the vocabulary is split: over tp_group",
        "give DistillationLoss this mesh as tp_group, or give it `to_local()`",
        code="layout-not-valid",
    )


def shard_range(rows: int, rank: int, size: int) -> tuple[int, int]:
    """Return (first row, number of rows) of a shard: `Shard(0)` gives all but the last ones as many rows."""
    widest = -(-rows // size)
    start = min(rank * widest, rows)
    return start, min(widest, rows - start)


def group_of(tp_group: Any) -> dist.ProcessGroup | None:
    """Return the process group of a DeviceMesh of one dimension, or the group itself."""
    return tp_group.get_group() if hasattr(tp_group, "get_group") else tp_group
