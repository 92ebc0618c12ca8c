"""Sums by index, bit-identical in every process and every run, and without waiting for the device.

On GPUs `index_add_` adds in the order in which threads arrive. So tensor-parallel ranks would disagree in the
last bit of numbers that they all compute. An accumulating `index_put_` synchronises. Segments of an ascending
index are summed in their order.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sum_segments(index: Tensor, values: Tensor, size: int) -> Tensor:
    """Return [size, ...]: the sum, or 0, of the `values` [n, ...] of each `index` [n] int64, ascending."""
    return _reduced("sum", _lengths(index, size), values, 0.0)


def sum_by(index: Tensor, values: Tensor, size: int) -> Tensor:
    """Return [size, ...]: `sum_segments` for an index [n] in any order."""
    index, order = index.sort(stable=True)
    return sum_segments(index, values[order], size)


def log_sum_exp_by(index: Tensor, values: Tensor, size: int) -> Tensor:
    """Return [size]: ln sum exp of the `values` [n] with each `index` [n], in any order; -inf without any."""
    index, order = index.sort(stable=True)
    lengths, values = _lengths(index, size), values[order]
    maximum = _reduced("max", lengths, values, torch.finfo(values.dtype).min)
    return maximum + _reduced("sum", lengths, (values - maximum[index]).exp(), 0.0).log()


def _lengths(index: Tensor, size: int) -> Tensor:
    return torch.searchsorted(index, torch.arange(size + 1, device=index.device)).diff()


def _reduced(how: str, lengths: Tensor, values: Tensor, initial: float) -> Tensor:
    """Reduce segments; `unsafe` skips a check of the lengths, for which the host would wait."""
    options = dict(lengths=lengths, axis=0, unsafe=True, initial=initial)
    return torch.segment_reduce(values.contiguous(), how, **options)
