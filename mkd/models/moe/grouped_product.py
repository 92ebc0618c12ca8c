"""Products of many experts in one kernel, whose launch does not depend on their number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm  # public since torch 2.10
ALIGNMENT = 8  # elements, 16 bytes: rows of all matrices must start at a multiple of it


class GroupedProduct(Function):
    """Rows [n, k], those of the first expert first; their ends int32 [E]; E weights [m, k] -> [n, m].

    Takes bf16 on GPUs (CUDA 9.0 and newer). A weight's gradient is summed in fp32 and rounded to bf16.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends)
        ctx.weights = weights  # parameters, which training does not change before backward
        return grouped_mm(rows, stacked(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends = ctx.saved_tensors
        gradient, of_rows = gradient.contiguous(), None
        if ctx.needs_input_grad[0]:
            of_rows = grouped_mm(gradient, stacked(ctx.weights), offs=ends)
        if not any(ctx.needs_input_grad[2:]):
            return of_rows, None, *(None for _ in ctx.weights)
        of_weights = grouped_mm(gradient.t(), rows, offs=ends)
        add_to_buffers(ctx.weights, of_weights)
        return of_rows, None, *of_weights.unbind()


def grouped_product(rows: Tensor, counts: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Multiply the rows of each expert, [n, k] and int64 [E] on any device, by its weight [m, k]: [n, m]."""
    ends = counts.to(rows.device, non_blocking=True).cumsum(0).int()
    return GroupedProduct.apply(rows, ends, *weights)


def add_to_buffers(weights: Sequence[Tensor], gradients: Tensor) -> None:
    """Add gradients [E, m, k] to Megatron's buffers in one kernel if these are neighbours.

    Megatron would launch a kernel for each weight. Its hooks expect the gradients all the same, and leave out
    what has been added.
    """
    if not all(hasattr(weight, "grad_added_to_main_grad") for weight in weights):
        return  # these weights have no buffers
    buffers = neighbours([weight.main_grad for weight in weights])
    if buffers is None:
        return
    buffers.add_(gradients)
    for weight in weights:
        weight.grad_added_to_main_grad = True


def stacked(weights: Sequence[Tensor]) -> Tensor:
    """Return [E, m, k]: a view where the weights follow each other in memory, else a copy."""
    view = neighbours(weights)
    return torch.stack([weight.detach() for weight in weights]) if view is None else view


def neighbours(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return tensors of one shape that follow each other in memory as one view [E, ...]; None for others."""
    first, size = tensors[0].detach(), tensors[0].nbytes
    begin, end = first.data_ptr(), first.untyped_storage().data_ptr() + first.untyped_storage().nbytes()
    follow = all(tensor.data_ptr() == begin + i * size for i, tensor in enumerate(tensors))
    if not follow or begin + len(tensors) * size > end:  # neighbours by chance lie beyond the storage
        return None
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


def place_side_by_side(module: nn.Module, names: Sequence[str]) -> None:
    """Move the weights of these names into one piece of memory, for `stacked`.

    Megatron's distributed optimizer fills its buffer in reverse order of registration, so register the
    weights again in reverse, to keep them adjacent.
    """
    weights = [getattr(module, name) for name in names]
    for weight, place in zip(weights, torch.stack([weight.detach() for weight in weights]), strict=True):
        weight.data = place
    for name in reversed(names):
        module.register_parameter(name, module._parameters.pop(name))


def can_group(rows: Tensor, weights: Sequence[Tensor]) -> bool:
    """Return True if the kernel takes these rows [n, k] and weights [m, k]."""
    weight = weights[0]
    return (
        rows.dtype == weight.dtype == torch.bfloat16
        and rows.size(0) > 0
        and all(size % ALIGNMENT == 0 for size in weight.shape)
        and (not rows.is_cuda or torch.cuda.get_device_capability(rows.device) >= (9, 0))
    )
