"""Sums by index, with the same bits in every process and every run."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_by(index: Tensor, values: Tensor, size: int) -> Tensor:
    """[size, ...]: the sum of the `values` [n, ...] with each `index` [n] int64, 0 without any.

    On GPUs `index_add_` adds in the order in which threads arrive, so that tensor-parallel ranks would disagree in the last
    bit of what they all compute; an accumulating `index_put_` sorts first.
    """
    result = torch.zeros(size, *values.shape[1:], dtype=values.dtype, device=values.device)
    return result.index_put_((index,), values, accumulate=True)
