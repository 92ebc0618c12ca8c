"""The numbers of a format, and the nearest one of a value. All calculations are in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX, E2M1_MAX = 448.0, 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SMALLEST = 1e-12  # a scale never divides by less


def quotient(x: Tensor, divisor: float) -> Tensor:
    """Return x / divisor as a CPU rounds it. A GPU would multiply by the reciprocal of a number."""
    return x / x.new_full((), divisor)


def to_integer(x: Tensor, bits: int) -> Tensor:
    """Return the nearest signed integers of so many bits; ties go to the even one."""
    limit = 2 ** (bits - 1)
    return x.round().clamp_(-limit, limit - 1)


def to_e4m3(x: Tensor) -> Tensor:
    """Return the nearest FP8 numbers (E4M3). Larger values become the largest number, 448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype)


def to_e2m1(x: Tensor) -> Tensor:
    """Return the nearest FP4 numbers (E2M1), ties to the even mantissa.

    Larger values become the largest number, 6. Numbers below 2 are multiples of 0.5, below 4 of 1, the others
    of 2. A tie between two of them goes to the even multiple, whose mantissa is 0.
    """
    magnitude = x.abs().clamp_(max=E2M1_MAX)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return (magnitude / step).round_().mul_(step).copysign_(x)


def e2m1_codes(values: Tensor) -> Tensor:
    """Return the 4-bit codes of numbers that `to_e2m1` has returned, uint8; bit 3 is the sign."""
    known = torch.tensor(E2M1_VALUES, dtype=values.dtype, device=values.device)
    codes = torch.bucketize(values.abs().contiguous(), known)
    return (codes + 8 * torch.signbit(values)).to(torch.uint8)


def e2m1_numbers(codes: Tensor) -> Tensor:
    """Return the numbers of 4-bit codes, fp32."""
    known = torch.tensor([*E2M1_VALUES, *(-one for one in E2M1_VALUES)], device=codes.device)
    return known[codes.long()]
