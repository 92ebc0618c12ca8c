"""Frozen weights in NF4: 4 bits each, and an fp32 scale for 64 neighbours of a row.

Without scales of scales, so that the shard of a rounded weight is the rounded shard: no layout changes a bit.
Source: Dettmers et al. 2023, QLoRA (arXiv 2305.14314). The package bitsandbytes has the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from mkd.models.placed.released_layers import released_like
from mkd.plan.models.lora_shape import NF4, NF4_BLOCK


class RoundedWeight:
    """A weight [out, in] in NF4, in the memory of 0.5625 bytes an element."""

    def __init__(self, weight: Tensor):
        from bitsandbytes.functional import quantize_4bit

        self.codes, self.state = quantize_4bit(
            weight.detach().contiguous(), blocksize=NF4_BLOCK, quant_type=NF4, compress_statistics=False
        )

    def dense(self) -> Tensor:
        """Return the rounded weight in the dtype that it had, [out, in]."""
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(self.codes, self.state)


def take_weight(linear: nn.Module) -> RoundedWeight:
    """Round the weight of a linear layer and free its memory. Its parameter keeps name and shape."""
    rounded = RoundedWeight(linear.weight)
    linear.weight.data = released_like(linear.weight)
    return rounded


class FrozenProduct(Function):
    """x W' for a rounded weight, which is dense in each pass only while it multiplies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: RoundedWeight) -> Tensor:
        ctx.rounded = weight
        return F.linear(x, weight.dense())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.rounded.dense(), None


def frozen_product(x: Tensor, weight: RoundedWeight) -> Tensor:
    """Return x [.., in] times a rounded weight [out, in], [.., out]; the weight has no gradient."""
    return FrozenProduct.apply(x, weight)


def memory_for(layer: nn.Module) -> None:
    """Give the parameters of a decoder layer memory on this process's device, without values."""
    for parameter in layer.parameters():
        like = dict(dtype=parameter.dtype, device=torch.cuda.current_device())
        parameter.data = torch.empty(parameter.shape, **like)
