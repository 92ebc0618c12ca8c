"""Features of the images of a row: each rank makes its own images', and all take what their rows need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from mkd.models.vision.tower import VisionTower
from mkd.parallel.context import ParallelContext
from mkd.parallel.image_row import ImageRow


class _ZeroGradients(torch.autograd.Function):
    """Identity of the first argument; the others get gradients of zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(torch.zeros_like(one) for one in ctx.parameters)


def with_zero_gradients(x: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return `x`, whose backward pass gives every one of `parameters` a gradient of zero.

    A micro-batch without images needs it: overlapped reduction of gradients starts when all have one.
    """
    return _ZeroGradients.apply(x, *parameters) if parameters and torch.is_grad_enabled() else x


def row_features(
    tower: VisionTower, images: ImageRow, width: int, dtype: torch.dtype, context: ParallelContext
) -> Tensor:
    """Return the features that this rank's rows take, [n, 1 + deepstack, width], in the order of its rows.

    Communication: one all-gather over the ranks that share the row (tensor x context parallel); backward:
    reduce-scatter SUM. With sequence parallelism each rank has the gradient of its own rows, so that the sum
    is the gradient. Without it each tensor-parallel rank has the whole gradient, and the sum is tp times it:
    `mark_tower` makes Megatron average the tower's gradients over the group instead of adding them.
    """
    levels = 1 + tower.shape.deepstack
    if images.grids:
        own = tower(images.normalised(dtype), images.grids)
    else:
        own = torch.zeros(0, levels, width, dtype=dtype, device=images.pixels.device)
        own = with_zero_gradients(own, tower.trained)
    if context.tp_size * context.cp_size > 1:
        padded = F.pad(own.flatten(1), (0, 0, 0, images.slots - len(own)))
        gathered = gather_from_sequence_parallel_region(padded, group=context.groups.tp_cp)
        own = gathered.unflatten(1, (levels, width))
    return own[images.features]


def mark_tower(tower: VisionTower, sequence_parallel: bool) -> None:
    """Mark the tower's parameters so that Megatron reduces their gradients over the tensor-parallel group.

    Each rank has the gradients of the images that it was dealt: all-reduce SUM with sequence parallelism, and
    AVG without it (see `row_features`). Data parallelism adds up those of context-parallel ranks.
    """
    for parameter in tower.parameters():
        if sequence_parallel:
            parameter.sequence_parallel = True
        else:
            parameter.average_gradients_across_tp_domain = True
