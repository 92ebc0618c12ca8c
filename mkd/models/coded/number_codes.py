"""Matrices of frozen experts as codes and scales, and inputs of their products in FP8.

An element is its code times its scale. Scales that mkd chooses are powers of two: such products are exact in
bf16, and E4M3 loses nothing by them, because it is a floating-point format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mkd.plan.models.stored_experts import BLOCK, MXFP4_GROUP
from mkd.rounding.number_grids import e2m1_numbers

SMALLEST = 2.0**-100
"""A largest magnitude counts as at least this, so that no scale is 0."""


@dataclass(frozen=True)
class Codes(ABC):
    """A form in which matrices [out, in] are stored, with the rounding of their products' inputs."""

    input_group: int | None = (
        None  # channels of a token that share a scale in FP8, 0: all; None: exact inputs
    )

    scale_dtype: ClassVar[torch.dtype] = torch.float32

    def codes_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the codes, uint8, of a matrix."""
        return rows, columns

    @abstractmethod
    def scales_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape of its scales."""

    @abstractmethod
    def decoded(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the elements of matrices [.., out, in], fp32."""

    def encode(self, matrix: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Write the codes and scales of a matrix."""
        raise NotImplementedError(f"{type(self).__name__} are only read from files")


@dataclass(frozen=True)
class RowCodes(Codes):
    """E4M3 with a scale for each row of the matrix, which is an output channel."""

    def scales_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return (rows,)

    def decoded(self, codes: Tensor, scales: Tensor) -> Tensor:
        return codes.view(torch.float8_e4m3fn).float() * scales[..., None]

    def encode(self, matrix: Tensor, codes: Tensor, scales: Tensor) -> None:
        values, own = to_fp8(matrix, 0)
        codes.copy_(values.view(torch.uint8))
        scales.copy_(own[:, 0])


@dataclass(frozen=True)
class BlockCodes(Codes):
    """E4M3 with a scale for each block of 128 x 128 elements, as DeepSeek-V3 is released.

    Source: DeepSeek-V3 technical report, section 3.3.
    """

    def scales_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return -(-rows // BLOCK), -(-columns // BLOCK)

    def decoded(self, codes: Tensor, scales: Tensor) -> Tensor:
        return codes.view(torch.float8_e4m3fn).float() * _spread(scales, codes)

    def encode(self, matrix: Tensor, codes: Tensor, scales: Tensor) -> None:
        rows, columns = (-(-size // BLOCK) * BLOCK for size in matrix.shape)
        padded = matrix.new_zeros(rows, columns)
        padded[: matrix.shape[0], : matrix.shape[1]] = matrix
        blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        scales.copy_(power_of_two_scale(blocks.abs().amax(dim=(1, 3))))
        values = matrix.float() / _spread(scales, matrix)
        codes.copy_(values.to(torch.float8_e4m3fn).view(torch.uint8))


@dataclass(frozen=True)
class MXFP4Codes(Codes):
    """E2M1, two elements a byte, with a power of two for each 32 elements of a row, as GPT-OSS is released.

    Source: OCP Microscaling Formats (MX) specification 1.0, section 5.
    """

    scale_dtype = torch.uint8  # exponent + 127

    def codes_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return rows, columns // 2

    def scales_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return rows, columns // MXFP4_GROUP

    def decoded(self, codes: Tensor, scales: Tensor) -> Tensor:
        elements = e2m1_numbers(torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2))
        powers = torch.exp2(scales.float() - 127)[..., None]
        return (elements.unflatten(-1, (-1, MXFP4_GROUP)) * powers).flatten(-2)


def _spread(scales: Tensor, like: Tensor) -> Tensor:
    """Return the scale of each element of matrices with the shape of `like`."""
    rows, columns = like.shape[-2:]
    of_rows = scales.repeat_interleave(BLOCK, -2)[..., :rows, :]
    return of_rows.repeat_interleave(BLOCK, -1)[..., :columns]


def power_of_two_scale(largest: Tensor) -> Tensor:
    """Return the smallest power of two that E4M3's largest number, 448, multiplies to `largest`; fp32.

    448 is 1.75 x 2^8. The mantissa of `largest` says whether 2^(exponent - 8) suffices.
    """
    bits = largest.float().clamp(min=SMALLEST).view(torch.int32)
    return (((bits + 0x1FFFFF) & 0x7F800000) - (8 << 23)).view(torch.float32)


def to_fp8(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return rows [n, k] in E4M3, and their scales fp32 [n, groups].

    `group`: channels that share a scale, the last ones perhaps fewer; 0: all of a row.
    """
    size = group or x.shape[-1]
    groups = -(-x.shape[-1] // size)
    padded = torch.nn.functional.pad(x.float(), (0, groups * size - x.shape[-1])).unflatten(
        -1, (groups, size)
    )
    scales = power_of_two_scale(padded.abs().amax(dim=-1))
    values = (padded / scales[..., None]).to(torch.float8_e4m3fn)
    return values.flatten(-2)[..., : x.shape[-1]].contiguous(), scales


def as_rounded(x: Tensor, group: int | None) -> Tensor:
    """Return rows [n, k] as a product in FP8 sees them, fp32; None: exact, in their dtype."""
    if group is None:
        return x
    values, scales = to_fp8(x, group)
    of_channels = scales.repeat_interleave(group or x.shape[-1], -1)[..., : x.shape[-1]]
    return values.float() * of_channels
