"""Round matrices [out, in], a group of elements with a scale each.

A scale is rounded to the dtype of its file before it divides, so that files hold exactly the weights of
training. What several processes must agree on, the largest magnitude of a whole row or matrix, is measured
first (`shared_peak`). The rest is arithmetic inside a group, so that the result does not depend on how a
matrix is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mkd.config.rounding_formats import ROW, Rounding
from mkd.rounding.number_grids import E2M1_MAX, E4M3_MAX, SMALLEST, quotient, to_e2m1, to_e4m3, to_integer

AT_ONCE = 2**24
"""Elements that are rounded together: the temporary memory is some times that of so many in fp32."""


@dataclass(frozen=True)
class Coded:
    """Some rows of a matrix as codes and scales."""

    codes: Tensor  # fp32 [out, in], numbers of the format
    scales: Tensor  # as files hold them, [out / block_rows, in / group]; fp32 exponents with MXFP4
    steps: Tensor  # fp32, the same shape: what a code is multiplied by
    block: tuple[int, int]  # rows and columns with one scale

    def values(self) -> Tensor:
        """Return the rounded elements, fp32 [out, in]."""
        rows, columns = self.block
        in_blocks = self.codes.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        return (in_blocks * self.steps[:, None, :, None]).flatten(2, 3).flatten(0, 1)


def shared_peak(matrix: Tensor, rounding: Rounding) -> Tensor | None:
    """Return the largest magnitude of each row, fp32 [out, 1], or of the matrix, fp32 [1].

    None: the format needs neither. Parts of a matrix have the maximum of all parts.
    """
    if rounding.kind.has_tensor_scale:
        return torch.linalg.vector_norm(matrix, float("inf")).float().reshape(1)
    if rounding.group == ROW:
        return torch.linalg.vector_norm(matrix, float("inf"), dim=-1, keepdim=True).float()
    return None


@torch.no_grad()
def round_in_place(matrix: Tensor, rounding: Rounding, peak: Tensor | None) -> None:
    """Round a matrix [out, in] of any float dtype. `peak` is that of the whole matrix."""
    for rows, part_peak in _parts(matrix, rounding, peak):
        rows.copy_(encode(rows, rounding, part_peak).values())


def encode(matrix: Tensor, rounding: Rounding, peak: Tensor | None) -> Coded:
    """Return codes and scales of a matrix, or of some of its rows.

    `peak` is that of the whole matrix.
    """
    size = matrix.size(-1) if rounding.group == ROW else rounding.group
    block = rounding.kind.block_rows, size
    groups = matrix.float().unflatten(0, (-1, block[0])).unflatten(2, (-1, size))  # [O, r, I, g]
    is_row = rounding.group == ROW and peak is not None
    largest = peak if is_row else groups.abs().amax(dim=(1, 3))
    scales, steps = _SCALES[rounding.format](largest, peak)
    codes = _GRIDS[rounding.format](groups / steps[:, None, :, None])
    return Coded(codes.flatten(2, 3).flatten(0, 1), scales, steps, block)


def tensor_scale(peak: Tensor) -> Tensor:
    """Return NVFP4's number of a whole matrix, fp32 [1]: the largest block scale then is the largest E4M3."""
    return (E4M3_MAX * E2M1_MAX) / peak.clamp(min=SMALLEST)


def nvfp4_scales(largest: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the E4M3 scales of blocks with these largest magnitudes, and what codes are multiplied by.

    Blocks that are too small for the scale get 1/8, as compressed-tensors gives them.
    """
    scales = (global_scale * quotient(largest, E2M1_MAX)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    wide = scales.float()
    wide = torch.where(wide == 0, 0.125, wide)
    return wide.to(torch.float8_e4m3fn), wide / global_scale


def _integer_scales(largest: Tensor, peak: Tensor | None, bits: int) -> tuple[Tensor, Tensor]:
    scales = quotient(largest, 2 ** (bits - 1) - 0.5).clamp(min=SMALLEST).to(torch.bfloat16)
    return scales, scales.float()


def _e4m3_scales(largest: Tensor, peak: Tensor | None) -> tuple[Tensor, Tensor]:
    scales = quotient(largest, E4M3_MAX).clamp(min=SMALLEST).to(torch.bfloat16)
    return scales, scales.float()


def _power_scales(largest: Tensor, peak: Tensor | None) -> tuple[Tensor, Tensor]:
    exponents = torch.floor(torch.log2(largest.clamp(min=2.0**-100))) - 2
    return exponents, torch.exp2(exponents)


def _nvfp4_scales(largest: Tensor, peak: Tensor | None) -> tuple[Tensor, Tensor]:
    assert peak is not None, "NVFP4 needs the largest magnitude of the matrix"
    return nvfp4_scales(largest, tensor_scale(peak))


_SCALES: dict[str, Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]] = {
    "int4": partial(_integer_scales, bits=4),
    "int8": partial(_integer_scales, bits=8),
    "fp8": _e4m3_scales,
    "fp8-block": _e4m3_scales,
    "mxfp4": _power_scales,
    "nvfp4": _nvfp4_scales,
}
_GRIDS: dict[str, Callable[[Tensor], Tensor]] = {
    "int4": partial(to_integer, bits=4),
    "int8": partial(to_integer, bits=8),
    "fp8": to_e4m3,
    "fp8-block": to_e4m3,
    "mxfp4": to_e2m1,
    "nvfp4": to_e2m1,
}


def _parts(matrix: Tensor, rounding: Rounding, peak: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield runs of rows with their part of the peak."""
    unit = rounding.kind.block_rows
    rows = max(1, AT_ONCE // (matrix.size(1) * unit)) * unit
    by_row = peak is not None and not rounding.kind.has_tensor_scale
    for start in range(0, matrix.size(0), rows):
        end = start + rows
        yield matrix[start:end], peak[start:end] if by_row and peak is not None else peak
