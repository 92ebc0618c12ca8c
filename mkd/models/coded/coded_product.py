"""Rows of tokens times the matrices of all experts, which are codes and scales."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from mkd.models.coded.number_codes import BlockCodes, Codes, MXFP4Codes, RowCodes, as_rounded
from mkd.models.moe.grouped_product import ALIGNMENT, grouped_mm
from mkd.plan.models.stored_experts import BLOCK

FIRST_FP8, HOPPER = (8, 9), (9, 0)
"""Compute capabilities: the first with products in FP8, and that of torch's with scales of rows."""

HAS_TRITON = importlib.util.find_spec("triton") is not None
MATRIX_UNIT = 16  # channels: rows of matrices in FP8 begin at multiples of 16 bytes
DECODED_ROWS = 16  # of a tile of `decode_mxfp4`


@dataclass(eq=False)
class CodedStack:
    """The matrices [out, in] of all experts of a process. Codes and scales are read wherever they are."""

    form: Codes
    rows: int  # of a matrix: out
    columns: int
    codes: Tensor  # uint8 [E, ...]
    scales: Tensor  # [E, ...]

    @property
    def size(self) -> int:
        """Number of matrices."""
        return self.codes.shape[0]

    def decoded(self, expert: int) -> Tensor:
        """Return the matrix of an expert, fp32."""
        return self.form.decoded(self.codes[expert], self.scales[expert])


@dataclass(frozen=True)
class ExpertRows:
    """The experts that rows belong to. Rows of the first one come first."""

    counts: Tensor  # int64 [E], anywhere
    ends: Tensor  # int32 [E], sums of the counts, on the device of the rows

    @classmethod
    def of(cls, counts: Tensor, device: torch.device) -> ExpertRows:
        return cls(counts, counts.to(device, non_blocking=True).cumsum(0).int())


def has_kernel(stack: CodedStack) -> bool:
    """Return True if the product with all matrices is one kernel, so that the host need not know counts."""
    if not stack.codes.is_cuda or not HAS_TRITON:
        return False
    capability = torch.cuda.get_device_capability(stack.codes.device)
    if stack.form.input_group is None:
        return capability >= HOPPER and stack.rows % ALIGNMENT == stack.columns % ALIGNMENT == 0
    return capability >= FIRST_FP8 and stack.rows % MATRIX_UNIT == stack.columns % MATRIX_UNIT == 0


def coded_product(
    rows: Tensor,  # [n, in]
    of_experts: ExpertRows,
    stack: CodedStack,
) -> Tensor:
    """Multiply the rows of each expert by its matrix: [n, out] in the dtype of the rows. No gradient."""
    if rows.shape[0] == 0:
        return rows.new_empty(0, stack.rows)
    if rows.dtype != torch.bfloat16 or not has_kernel(stack):
        return _one_by_one(rows, of_experts, stack)
    if stack.form.input_group is None:
        return grouped_mm(rows, decoded_stack(stack).transpose(1, 2), offs=of_experts.ends)
    values, scales = rounded_rows(rows, stack.form.input_group)
    is_hopper = torch.cuda.get_device_capability(rows.device)[0] == HOPPER[0]
    if isinstance(stack.form, RowCodes) and is_hopper:
        return torch._scaled_grouped_mm(
            values,
            stack.codes.view(torch.float8_e4m3fn).transpose(1, 2),
            scales.flatten(),
            stack.scales,
            offs=of_experts.ends,
            out_dtype=rows.dtype,
            use_fast_accum=True,
        )
    return tiled_product(values, scales, of_experts, stack, rows.dtype)


def _one_by_one(rows: Tensor, of_experts: ExpertRows, stack: CodedStack) -> Tensor:
    """Decode the matrices one after another. Inputs are rounded as in the kernels; sums are in fp32 then."""
    rounded, output = as_rounded(rows, stack.form.input_group), rows.new_empty(len(rows), stack.rows)
    sizes = of_experts.counts.tolist()
    for expert, (part, result) in enumerate(zip(rounded.split(sizes), output.split(sizes), strict=True)):
        if len(part):
            result.copy_(part @ stack.decoded(expert).to(part.dtype).t())
    return output


def rounded_rows(rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return `to_fp8` of rows, in one kernel."""
    from mkd.models.coded.coded_kernels import round_rows

    size, (number, width) = group or rows.shape[1], rows.shape
    groups = -(-width // size)
    values = torch.empty_like(rows, dtype=torch.float8_e4m3fn)
    scales = torch.empty(number, groups, dtype=torch.float32, device=rows.device)
    sizes = dict(GROUPS=_power_of_two(groups), CHANNELS=_power_of_two(size))
    round_rows[(number,)](rows.contiguous(), values, scales, width, size, **sizes)
    return values, scales


def tiled_product(
    values: Tensor,  # E4M3 [n, in]
    scales: Tensor,  # fp32 [n, groups]
    of_experts: ExpertRows,
    stack: CodedStack,
    dtype: torch.dtype,
) -> Tensor:
    """Return the product [n, out] by mkd's own kernel."""
    from mkd.models.coded.coded_kernels import multiply_groups

    ends = of_experts.ends
    tiles = torch.diff(ends, prepend=ends.new_zeros(1)).add_(BLOCK - 1).div_(BLOCK, rounding_mode="floor")
    output = torch.empty(len(values), stack.rows, dtype=dtype, device=values.device)
    grid = (-(-stack.rows // BLOCK), -(-len(values) // BLOCK) + stack.size)
    codes = stack.codes.view(torch.float8_e4m3fn)
    tensors = values, scales, codes, stack.scales, output, ends, tiles.cumsum(0).int()
    kind = dict(EXPERTS=_power_of_two(stack.size), BLOCKS=isinstance(stack.form, BlockCodes))
    multiply_groups[grid](*tensors, stack.size, stack.columns, stack.rows, **kind, num_warps=8, num_stages=3)
    return output


def decoded_stack(stack: CodedStack) -> Tensor:
    """Return all matrices, bf16 [E, out, in]."""
    shape = stack.size, stack.rows, stack.columns
    output = torch.empty(shape, dtype=torch.bfloat16, device=stack.codes.device)
    decode = _decode_mxfp4 if isinstance(stack.form, MXFP4Codes) else _decode_blocks
    decode(stack, output)
    return output


def _decode_blocks(stack: CodedStack, output: Tensor) -> None:
    from mkd.models.coded.coded_kernels import decode_blocks

    grid = (-(-stack.columns // BLOCK), -(-stack.rows // BLOCK), stack.size)
    codes = stack.codes.view(torch.float8_e4m3fn)
    decode_blocks[grid](codes, stack.scales, output, stack.rows, stack.columns)


def _decode_mxfp4(stack: CodedStack, output: Tensor) -> None:
    from mkd.models.coded.coded_kernels import decode_mxfp4

    rows = stack.size * stack.rows
    grid = (-(-stack.columns // (2 * BLOCK)), -(-rows // DECODED_ROWS))
    decode_mxfp4[grid](stack.codes, stack.scales, output, rows, stack.columns, ROWS=DECODED_ROWS)


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
