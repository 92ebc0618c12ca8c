"""Exchange rows of a tensor between the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def exchange_rows(
    hidden: Tensor,  # [t, h]
    send_rows: Tensor,  # [sum of send_counts] int64, rows of `hidden` by destination; may repeat
    send_counts: Sequence[int],  # rows for each rank of the group, this one included
    receive_counts: Sequence[int],  # rows from each rank
    group: dist.ProcessGroup,
) -> Tensor:
    """Return the received rows [sum of receive_counts, h] by source rank, in the order of its `send_rows`.

    All-to-all over the group, even if this rank sends or receives nothing. Backward: the reverse all-to-all.
    The gradient of a row is the sum over the ranks that received it, accumulated in fp32 or wider.
    """
    size = dist.get_world_size(group)
    assert len(send_counts) == len(receive_counts) == size, f"counts of a group of {size} ranks"
    assert send_rows.shape == (sum(send_counts),), "send_rows lists the rows for every rank"
    return _ExchangeRows.apply(hidden, send_rows, list(send_counts), list(receive_counts), group)


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, send_rows, send_counts, receive_counts, group):
        ctx.save_for_backward(send_rows)
        ctx.plan, ctx.shape = (receive_counts, send_counts, group), hidden.shape
        return _all_to_all(hidden[send_rows], send_counts, receive_counts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (send_rows,) = ctx.saved_tensors
        returned = _all_to_all(gradient.contiguous(), *ctx.plan)
        total = torch.promote_types(gradient.dtype, torch.float32)
        result = torch.zeros(ctx.shape, dtype=total, device=gradient.device)
        result.index_add_(0, send_rows, returned.to(total))
        return result.to(gradient.dtype), None, None, None, None


def _all_to_all(
    rows: Tensor, send_counts: list[int], receive_counts: list[int], group: dist.ProcessGroup
) -> Tensor:
    received = rows.new_empty(sum(receive_counts), rows.shape[1])
    dist.all_to_all_single(received, rows, receive_counts, send_counts, group=group)
    return received
