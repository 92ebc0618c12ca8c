"""Triton kernels of experts in FP8 and FP4, launched by `coded_product.py`.

No kernel needs the numbers of rows on the host: the grid has room for the most tiles that they can need, and
a program finds its expert itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = tl.constexpr(128)
"""Rows, columns and channels of a tile, and elements with one scale along both sides of a block."""

SMALLEST = tl.constexpr(2.0**-100)


@triton.jit
def round_rows(
    rows, codes, scales, width, group,
    GROUPS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write row `program_id` [width] in E4M3, with a power of two as scale of each `group` channels.

    GROUPS x CHANNELS: powers of two that cover the groups and their channels.
    """
    row = tl.program_id(0).to(tl.int64)
    groups, channels = tl.arange(0, GROUPS), tl.arange(0, CHANNELS)
    columns = groups[:, None] * group + channels[None, :]
    inside = (columns < width) & (channels[None, :] < group)
    values = tl.load(rows + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(values), axis=1), SMALLEST)
    bits = ((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000) - (8 << 23)
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)  # exact: both are powers of two
    tl.store(
        codes + row * width + columns, (values * inverse[:, None]).to(codes.dtype.element_ty), mask=inside
    )
    count = tl.cdiv(width, group)
    tl.store(scales + row * count + groups, bits.to(tl.float32, bitcast=True), mask=groups < count)


@triton.jit
def multiply_groups(
    rows, row_scales, codes, scales, output, ends, tile_ends, experts, width, outputs,
    EXPERTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write a tile of rows times the matrix of their expert, both in E4M3, summed in fp32.

    rows [n, width] with row_scales [n, blocks], codes [experts, outputs, width], output [n, outputs]. `ends`
    and `tile_ends` [experts]: sums of rows, and of tiles, up to each expert. BLOCKS: scales [experts, blocks
    of outputs, blocks of width]; else [experts, outputs], and one scale a row. EXPERTS: a power of two.
    """
    tile = tl.program_id(1)
    every = tl.arange(0, EXPERTS)
    known = tl.load(tile_ends + every, mask=every < experts, other=2147483647)
    expert = tl.sum((known <= tile).to(tl.int32))
    if expert >= experts:
        return
    before = tl.maximum(expert - 1, 0)
    first_tile = tl.where(expert > 0, tl.load(tile_ends + before), 0)
    first_row = tl.where(expert > 0, tl.load(ends + before), 0)
    of_rows = first_row + (tile - first_tile) * TILE + tl.arange(0, TILE)
    of_outputs = tl.program_id(0) * TILE + tl.arange(0, TILE)
    in_rows, in_outputs = of_rows < tl.load(ends + expert), of_outputs < outputs
    channels, blocks = tl.arange(0, TILE), tl.cdiv(width, TILE)
    row_at = rows + of_rows.to(tl.int64)[:, None] * width
    code_at = codes + (expert.to(tl.int64) * outputs + of_outputs)[None, :] * width
    sums = tl.zeros((TILE, TILE), dtype=tl.float32)
    for block in range(0, blocks):
        at = block * TILE + channels
        inside = at < width
        left = tl.load(row_at + at[None, :], mask=in_rows[:, None] & inside[None, :], other=0.0)
        right = tl.load(code_at + at[:, None], mask=in_outputs[None, :] & inside[:, None], other=0.0)
        if BLOCKS:
            own = tl.load(row_scales + of_rows * blocks + block, mask=in_rows, other=0.0)
            stripes = tl.cdiv(outputs, TILE)
            of_block = tl.load(scales + (expert * stripes + tl.program_id(0)) * blocks + block)
            sums += tl.dot(left, right) * (own * of_block)[:, None]
        else:
            sums = tl.dot(left, right, sums)
    if not BLOCKS:
        own = tl.load(row_scales + of_rows, mask=in_rows, other=0.0)
        of_outputs_scale = tl.load(scales + expert * outputs + of_outputs, mask=in_outputs, other=0.0)
        sums *= own[:, None] * of_outputs_scale[None, :]
    at = output + of_rows.to(tl.int64)[:, None] * outputs + of_outputs[None, :]
    tl.store(at, sums.to(output.dtype.element_ty), mask=in_rows[:, None] & in_outputs[None, :])


@triton.jit
def decode_blocks(codes, scales, output, outputs, width):
    """Write a tile of matrices in E4M3 with scales of blocks as [experts, outputs, width]."""
    expert = tl.program_id(2).to(tl.int64)
    of_outputs = tl.program_id(1) * TILE + tl.arange(0, TILE)
    channels = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = (of_outputs < outputs)[:, None] & (channels < width)[None, :]
    at = (expert * outputs + of_outputs)[:, None] * width + channels[None, :]
    stripes, blocks = tl.cdiv(outputs, TILE), tl.cdiv(width, TILE)
    scale = tl.load(scales + (expert * stripes + tl.program_id(1)) * blocks + tl.program_id(0))
    values = tl.load(codes + at, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(output + at, values.to(output.dtype.element_ty), mask=inside)


@triton.jit
def decode_mxfp4(codes, scales, output, rows, width, ROWS: tl.constexpr):
    """Write ROWS x 256 elements of a matrix [rows, width] of MXFP4."""
    of_rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    of_bytes = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = (of_rows < rows)[:, None] & (of_bytes < width // 2)[None, :]
    packed = tl.load(codes + of_rows[:, None] * (width // 2) + of_bytes[None, :], mask=inside, other=0)
    groups = tl.program_id(0) * (TILE // 16) + tl.arange(0, TILE // 16)  # 16 bytes share a scale
    known = (of_rows < rows)[:, None] & (groups < width // 32)[None, :]
    exponent = tl.load(scales + of_rows[:, None] * (width // 32) + groups[None, :], mask=known, other=127)
    power = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    power = tl.reshape(tl.broadcast_to(power[:, :, None], (ROWS, TILE // 16, 16)), (ROWS, TILE))
    packed = packed.to(tl.int32)
    pair = tl.join(_element(packed & 15) * power, _element(packed >> 4) * power)
    columns = 2 * of_bytes
    to = output + of_rows[:, None] * width + columns[None, :]
    both = tl.join(to, to + 1)
    within = tl.join(inside, inside)
    tl.store(both, pair.to(output.dtype.element_ty), mask=within)


@triton.jit
def _element(code):
    """Return the element of a code of E2M1, whose bit 3 is the sign; fp32.

    Its two bits of exponent and one of mantissa become those of fp32. 0 and 0.5 have no implicit 1.
    """
    magnitude = code & 7
    normal = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)
    bits = tl.where(magnitude < 2, magnitude * (126 << 23), normal)
    return (bits | ((code >> 3) << 31)).to(tl.float32, bitcast=True)
