"""The activation of grouped experts without gates, as few kernels that keep little for backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class WeightedSquaredReLU(Function):
    """[n, f], weights fp32 [n, 1] -> [n, f]: weight * relu(x)^2. Computes in fp32 and keeps its inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights)
        return _function(_forward, x.is_cuda)(x, weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weights = ctx.saved_tensors
        return _function(_backward, x.is_cuda)(gradient, x, weights)


@cache
def _function(function: Callable[..., Any], is_compiled: bool) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True) if is_compiled else function


def _forward(x: Tensor, weights: Tensor) -> Tensor:
    return (weights * x.float().relu().square()).to(x.dtype)


def _backward(gradient: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    positive, gradient = x.float().relu(), gradient.float()
    of_weights = (gradient * positive.square()).sum(-1, keepdim=True)
    return (2 * weights * positive * gradient).to(x.dtype), of_weights.to(weights.dtype)
