"""Rounding as its definition reads: each element becomes the nearest number, by trying all numbers."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

INT4 = [float(one) for one in range(-8, 8)]
INT8 = [float(one) for one in range(-128, 128)]
E2M1 = [s * v for s, v in itertools.product((1, -1), (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))]
E4M3 = [
    float(one) for one in torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float() if one == one
]
GROUPS = {"int4": 32, "int8": 0, "fp8": 0, "fp8-block": 128, "mxfp4": 32, "nvfp4": 16}


def nearest(x: Tensor, numbers: list[float], even: Tensor) -> Tensor:
    """Return the nearest of `numbers` for each element; of two that are equally near, the `even` one."""
    table = torch.tensor(sorted(set(numbers)), dtype=torch.float64)
    distance = (x.double()[..., None] - table).abs()
    distance = torch.where(even & (distance == distance.min(-1, keepdim=True).values), -1.0, distance)
    return table[distance.argmin(-1)].float()


def even_mantissas(numbers: list[float], name: str) -> Tensor:
    """Return which of the sorted numbers have an even last bit."""
    table = sorted(set(numbers))
    if name.startswith("int"):
        return torch.tensor([one % 2 == 0 for one in table])
    if numbers is E2M1:
        return torch.tensor([abs(one) in (0.0, 1.0, 2.0, 4.0) for one in table])
    codes = torch.tensor(table).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes % 2 == 0


def rounded(weight: Tensor, name: str, peak: Tensor | None = None, group: int | None = None) -> Tensor:
    """Return the rounded weight [out, in], fp32. `peak`: largest magnitude of the matrix, for NVFP4."""
    wide, group = weight.float(), GROUPS[name] if group is None else group
    out, size = wide.shape[0], group or wide.shape[1]
    rows = 128 if name == "fp8-block" else 1
    blocks = wide.reshape(out // rows, rows, -1, size)
    largest = blocks.abs().amax((1, 3), keepdim=True)
    if name in ("int4", "int8"):
        step = (largest / (7.5 if name == "int4" else 127.5)).clamp(min=1e-12).bfloat16().float()
    elif name in ("fp8", "fp8-block"):
        step = (largest / 448).clamp(min=1e-12).bfloat16().float()
    elif name == "mxfp4":
        step = torch.exp2(torch.floor(torch.log2(largest.clamp(min=2.0**-100))) - 2)
    else:
        whole = 448 * 6 / (wide.abs().max() if peak is None else peak)
        scale = (whole * (largest / 6)).clamp(max=448).to(torch.float8_e4m3fn).float()
        step = torch.where(scale == 0, 0.125, scale) / whole
    numbers = {"int4": INT4, "int8": INT8, "fp8": E4M3, "fp8-block": E4M3}.get(name, E2M1)
    codes = nearest(blocks / step, numbers, even_mantissas(numbers, name))
    return (codes * step).reshape(wide.shape)
