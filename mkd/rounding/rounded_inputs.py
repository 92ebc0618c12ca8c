"""Round the inputs of matrices. The gradient passes as if the inputs were exact (straight-through)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from mkd.rounding.number_grids import E2M1_MAX, E4M3_MAX, SMALLEST, quotient, to_e2m1, to_e4m3, to_integer
from mkd.rounding.rounded_matrix import nvfp4_scales, tensor_scale

INT8_DIVISOR = 127.5
BLOCK = 16  # channels with one scale in NVFP4


class RoundInputs(Function):
    """[.., channels] -> the same, rounded. Backward: the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, format: str, peak: Tensor) -> Tensor:
        return round_inputs(x, format, peak)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


def token_peak(x: Tensor) -> Tensor:
    """Return the largest magnitude of each token, [.., 1], in the dtype of x [.., channels]."""
    return x.detach().abs().amax(dim=-1, keepdim=True)


def round_inputs(
    x: Tensor,  # [.., channels]
    format: str,
    peak: Tensor,  # of all channels: [.., 1] for each token; with NVFP4 [1], the calibrated one
    dtype: torch.dtype = torch.float32,  # of the calculation
) -> Tensor:
    """Return x rounded, in its dtype.

    Kernels calculate in fp32; transformers does so in the model's dtype.
    """
    wide, peak = x.to(dtype), peak.to(dtype)
    if format == "int8":
        scale = quotient(peak, INT8_DIVISOR).clamp(min=SMALLEST)
        rounded = to_integer(wide / scale, 8) * scale
    elif format == "fp8":
        scale = quotient(peak, E4M3_MAX).clamp(min=SMALLEST)
        rounded = to_e4m3(wide / scale) * scale
    else:
        assert format == "nvfp4", format
        rounded = _nvfp4(x, peak.float(), dtype)
    return rounded.to(x.dtype)


def _nvfp4(x: Tensor, peak: Tensor, dtype: torch.dtype) -> Tensor:
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    if dtype != torch.float32:  # one division in that dtype; everything else is in fp32
        largest = quotient(largest.to(dtype), E2M1_MAX).float() * E2M1_MAX
    _, steps = nvfp4_scales(largest, tensor_scale(peak))
    return (to_e2m1(blocks / steps) * steps).flatten(-2)
