"""Features of the images of a row: each rank makes its own images', and all take what their rows need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from mkd.models.vision.tower import VisionTower
from mkd.parallel.context import ParallelContext
from mkd.parallel.image_row import ImageRow


class _TowerPass(torch.autograd.Function):
    """A pass of the tower whose backward computes the gradients of all parameters and leaves them in `found`.

    A rank with other images, or none, has another graph: gradients would come in another order, or never.
    Data-parallel ranks reduce gradients in buckets, in the order in which these are complete: it must be the
    same everywhere. `_HandOut` gives the parameters their gradients one by one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        last: Tensor,
        run: Callable[[], Tensor],
        parameters: list[Tensor],
        found: list[Tensor | None],
    ) -> Tensor:
        with torch.enable_grad():
            ctx.features = run()
        ctx.parameters, ctx.found = parameters, found
        ctx.save_for_backward(last)
        return ctx.features.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        features, ctx.features = ctx.features, None
        if features.requires_grad:
            ctx.found += torch.autograd.grad(features, ctx.parameters, gradient, allow_unused=True)
        else:
            ctx.found += [None] * len(ctx.parameters)
        return torch.zeros_like(ctx.saved_tensors[0]), None, None, None


class _HandOut(torch.autograd.Function):
    """Identity of `x`; its backward gives `parameter` the last of the gradients in `found`, None being zero.

    autograd adds a gradient to its parameter before it continues the chain.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, found: list[Tensor | None]) -> Tensor:
        ctx.parameter, ctx.found = parameter, found
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        own = ctx.found.pop()
        return gradient, torch.zeros_like(ctx.parameter) if own is None else own, None


def _finish_gathers(tower: VisionTower) -> None:
    """Wait for the tower's parameters, module by module, where an overlapped gather still brings them.

    Megatron's DDP waits, and asks for the next parameters, in forward pre-hooks. They run here in the order
    of the parameters, because the tower's pass has another order on some ranks, or calls no module.
    """
    for module in tower.modules():
        for hook in module._forward_pre_hooks.values():
            hook(module, ())


def own_features(tower: VisionTower, images: ImageRow | None, width: int, dtype: torch.dtype) -> Tensor:
    """Return the features of this rank's images, [n, 1 + deepstack, width]; n is 0 without images."""

    def run() -> Tensor:
        if images is not None and images.grids:
            return tower(images.normalised(dtype), images.grids)
        return torch.zeros(0, 1 + tower.shape.deepstack, width, dtype=dtype, device=tower.device)

    trained = tower.trained if torch.is_grad_enabled() else []
    if not trained:
        return run()
    _finish_gathers(tower)
    found: list[Tensor | None] = []
    link = torch.zeros((), device=tower.device)
    for parameter in trained:
        link = _HandOut.apply(link, parameter, found)
    return _TowerPass.apply(link, run, trained, found)


def row_features(
    tower: VisionTower, images: ImageRow | None, width: int, dtype: torch.dtype, context: ParallelContext
) -> Tensor:
    """Return the features that this rank's rows take, [n, 1 + deepstack, width], in the order of its rows.

    Communication: one all-gather over the ranks that share the row (tensor x context parallel); backward:
    reduce-scatter SUM. With sequence parallelism each rank has the gradient of its own rows, so that the sum
    is the gradient. Without it each tensor-parallel rank has the whole gradient, and the sum is tp times it:
    `mark_tower` makes Megatron average the tower's gradients over the group instead of adding them.
    """
    own = own_features(tower, images, width, dtype)
    if images is None or not images.slots:
        return own
    if context.sizes.row > 1:
        assert context.groups is not None, "several processes have groups"
        padded = F.pad(own.flatten(1), (0, 0, 0, images.slots - len(own)))
        gathered = gather_from_sequence_parallel_region(padded, group=context.groups.tp_cp)
        own = gathered.unflatten(1, own.shape[1:])
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
