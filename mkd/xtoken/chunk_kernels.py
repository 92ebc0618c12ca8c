"""Triton kernels over the rows of both models' logits, for 1-1 chunks and for chains.

`chunk_triton_passes.py` launches them.

Columns have codes: 0 is a column without a row of the model, OTHER is a row without a twin, COMMON is a
common token. The twin of a common token is in the same column of the other model. The support of a row are
its common columns, with top-k only those where the teacher's logit is not below `lowest`. Lanes, tiles and
the running softmax are those of `losses/triton_kernels.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mkd.losses.triton.triton_divergences import LN2, LOG2E, class_mass_slope, class_parts
from mkd.losses.triton.triton_kernels import LOWEST, NOWHERE, add_to_softmax

OTHER, COMMON = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _load(row, columns, width):
    """Return the fp32 logits of a tile, LOWEST beyond the row."""
    return tl.load(row + columns, mask=columns < width, other=LOWEST).to(tl.float32)


@triton.jit
def _codes(codes, columns, width):
    return tl.load(codes + columns, mask=columns < width, other=0)


@triton.jit
def _store_log_sum(out, maximum, total, scale):
    """Store ln sum exp of z / T over all lanes; about LOWEST if there is no column."""
    largest = tl.max(maximum, axis=0)
    total = tl.sum(total * tl.exp2((maximum - largest) * scale), axis=0)
    tl.store(out, tl.where(largest == LOWEST, LOWEST, (largest * scale + tl.log2(total)) * LN2))


@triton.jit
def support_sums_kernel(
    student_pointer,  # [n, student_width]
    teacher_pointer,  # [n, teacher_width]
    student_codes, teacher_codes,  # int8
    lowest_pointer,  # [n] fp32 with TOP_K
    out_pointer,  # [4, n] fp32: the student's support and rest, the teacher's
    student_stride, teacher_stride, n, student_width, teacher_width, inverse_temperature,
    TOP_K: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute ln sum exp of z / T, one program per row."""
    row = tl.program_id(0).to(tl.int64)
    student, teacher = student_pointer + row * student_stride, teacher_pointer + row * teacher_stride
    tile = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    scale = inverse_temperature * LOG2E
    zero, none = tl.zeros((LANES,), tl.float32), tl.full((LANES,), LOWEST, tl.float32)
    m_s, s_s, m_sr, s_sr, m_t, s_t, m_tr, s_tr = none, zero, none, zero, none, zero, none, zero
    for first in range(0, teacher_width, LANES * WIDTH):
        columns = first + tile
        code, z = _codes(teacher_codes, columns, teacher_width), _load(teacher, columns, teacher_width)
        support = code == COMMON
        if TOP_K:
            support = support & (z >= tl.load(lowest_pointer + row))
        m_t, s_t, _a, _b, _c = add_to_softmax(m_t, s_t, tl.where(support, z, LOWEST), scale)
        rest = (code != 0) & (support == 0)
        m_tr, s_tr, _a, _b, _c = add_to_softmax(m_tr, s_tr, tl.where(rest, z, LOWEST), scale)
        if first < student_width:
            code, z = _codes(student_codes, columns, student_width), _load(student, columns, student_width)
            m_s, s_s, _a, _b, _c = add_to_softmax(m_s, s_s, tl.where(support, z, LOWEST), scale)
            rest = (code != 0) & (support == 0)
            m_sr, s_sr, _a, _b, _c = add_to_softmax(m_sr, s_sr, tl.where(rest, z, LOWEST), scale)
    out = out_pointer + row
    _store_log_sum(out, m_s, s_s, scale)
    _store_log_sum(out + n, m_sr, s_sr, scale)
    _store_log_sum(out + 2 * n, m_t, s_t, scale)
    _store_log_sum(out + 3 * n, m_tr, s_tr, scale)


@triton.jit
def _logs(student, teacher, columns, width, teacher_width, student_total, teacher_total, scale):
    """Return (log2 p_s, log2 p_t, the teacher's logits) of a tile of the student's columns."""
    z_s, z_t = _load(student, columns, width), _load(teacher, columns, teacher_width)
    return z_s * scale - student_total * LOG2E, z_t * scale - teacher_total * LOG2E, z_t


@triton.jit
def support_parts_kernel(
    student_pointer, teacher_pointer, student_codes, lowest_pointer,  # as above
    student_total_pointer, teacher_total_pointer,  # [n] fp32, normalisers of z / T over the whole vocabulary
    out_pointer,  # [k, n] fp32
    student_stride, teacher_stride, n, student_width, teacher_width, inverse_temperature,
    first_number, second_number,  # of the divergence's `Formula`
    TOP_K: tl.constexpr, KIND: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sum `Divergence.parts` over the support, one program per row."""
    row = tl.program_id(0).to(tl.int64)
    student, teacher = student_pointer + row * student_stride, teacher_pointer + row * teacher_stride
    student_total, teacher_total = tl.load(student_total_pointer + row), tl.load(teacher_total_pointer + row)
    tile = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    scale = inverse_temperature * LOG2E
    first_part, second_part = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    for first in range(0, student_width, LANES * WIDTH):
        columns = first + tile
        a, b, z_t = _logs(
            student, teacher, columns, student_width, teacher_width, student_total, teacher_total, scale
        )
        support = _codes(student_codes, columns, student_width) == COMMON
        if TOP_K:
            support = support & (z_t >= tl.load(lowest_pointer + row))
        a, b = tl.where(support, a, 0.0), tl.where(support, b, 0.0)  # equal: all terms 0
        one, two = class_parts(a, b, first_number, second_number, KIND, FIRST, SECOND)
        first_part += tl.sum(one, axis=1)
        second_part += tl.sum(two, axis=1)
    out = out_pointer + row
    if FIRST:
        tl.store(out, tl.sum(first_part, axis=0))
        out += n
    if SECOND:
        tl.store(out, tl.sum(second_part, axis=0))


@triton.jit
def support_gradient_kernel(
    student_pointer, teacher_pointer, student_codes, lowest_pointer,  # the student's logits are overwritten
    student_total_pointer, teacher_total_pointer,
    scale_pointer,  # [n] fp32: rows of 0 become 0
    support_factor_pointer, rest_factor_pointer,  # [n] fp32, of p_s in the support and beside it
    student_stride, teacher_stride, student_width, teacher_width, inverse_temperature,
    first_number, second_number,  # of the divergence's `Formula`
    TOP_K: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write (s D in the support + factor p_s) * scale, one program per row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    student, teacher = student_pointer + row * student_stride, teacher_pointer + row * teacher_stride
    weight = tl.load(scale_pointer + row)
    result = tl.zeros((BLOCK,), tl.float32)
    if weight != 0.0:
        student_total, teacher_total = (
            tl.load(student_total_pointer + row),
            tl.load(teacher_total_pointer + row),
        )
        scale = inverse_temperature * LOG2E
        a, b, z_t = _logs(
            student, teacher, columns, student_width, teacher_width, student_total, teacher_total, scale
        )
        code = _codes(student_codes, columns, student_width)
        support = code == COMMON
        if TOP_K:
            support = support & (z_t >= tl.load(lowest_pointer + row))
        a, b = tl.where(code == 0, LOWEST, a), tl.where(support, b, LOWEST)
        p_s = tl.exp2(a)
        slope = class_mass_slope(a, b, p_s, first_number, second_number, KIND)
        factor = tl.where(support, tl.load(support_factor_pointer + row), tl.load(rest_factor_pointer + row))
        result = (tl.where(support, slope, 0.0) + p_s * factor) * weight
    tl.store(student + columns, result.to(student_pointer.dtype.element_ty), mask=columns < student_width)


@triton.jit
def token_statistics_kernel(
    pointer,  # [n, width] logits
    codes,  # int8
    # [4, n] fp32: ln sum exp of z / T, entropy of this softmax, the largest logit, its first column
    out_pointer,
    stride, n, width, inverse_temperature,
    LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute statistics over the columns whose code is not 0, one program per row."""
    row = tl.program_id(0).to(tl.int64)
    logits, out = pointer + row * stride, out_pointer + row
    lane = tl.arange(0, LANES)
    tile = lane[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    scale = inverse_temperature * LOG2E
    maximum, total = tl.full((LANES,), LOWEST, tl.float32), tl.zeros((LANES,), tl.float32)
    mean, top = total, tl.zeros((LANES,), tl.int32)
    for first in range(0, width, LANES * WIDTH):
        columns = first + tile
        values = tl.where(_codes(codes, columns, width) != 0, _load(logits, columns, width), LOWEST)
        old = maximum
        new, new_total, centred, exps, factor = add_to_softmax(maximum, total, values, scale)
        mean = (mean + total * (old - new)) * factor + tl.sum(exps * centred, axis=1)
        maximum, total = new, new_total
        top = tl.where(new > old, first, top)
    largest = tl.max(maximum, axis=0)
    factor = tl.exp2((maximum - largest) * scale)
    mean = tl.sum((mean + total * (maximum - largest)) * factor, axis=0)
    total = tl.sum(total * factor, axis=0)
    log_total = tl.log2(total) * LN2
    tl.store(out, largest * inverse_temperature + log_total)
    tl.store(out + n, log_total - mean / total * inverse_temperature)
    tl.store(out + 2 * n, largest)
    # It is among the WIDTH columns that a lane read when it last met a new maximum.
    group = tl.min(tl.where(maximum == largest, top + lane * WIDTH, NOWHERE), axis=0) + tl.arange(0, WIDTH)
    found = (_load(logits, group, width) == largest) & (_codes(codes, group, width) != 0)
    tl.store(out + 3 * n, tl.min(tl.where(found, group, NOWHERE), axis=0).to(tl.float32))


@triton.jit
def scatter_kernel(
    pointer,  # [n, width], modified
    rows, columns,  # [e] int64; columns from `width` on are other ranks' and skipped
    values,  # [e] fp32
    stride, count, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Set logits[rows, columns] = values."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = index < count
    row, column = tl.load(rows + index, mask=exists, other=0), tl.load(columns + index, mask=exists, other=0)
    value = tl.load(values + index, mask=exists, other=0.0).to(pointer.dtype.element_ty)
    tl.store(pointer + row * stride + column, value, mask=exists & (column < width))


@triton.jit
def softmax_gradient_kernel(
    pointer,  # [n, width] logits, overwritten
    codes,  # int8
    total_pointer,  # [n] fp32, normalisers of z / T
    factor_pointer,  # [n] fp32: rows of 0 become 0
    stride, width, inverse_temperature,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write p * factor, 0 where the code is 0, one program per row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(factor_pointer + row)
    result = tl.zeros((BLOCK,), tl.float32)
    if factor != 0.0:
        log_p = _load(pointer + row * stride, columns, width) * inverse_temperature - tl.load(
            total_pointer + row
        )
        result = tl.where(_codes(codes, columns, width) != 0, tl.exp2(log_p * LOG2E) * factor, 0.0)
    tl.store(pointer + row * stride + columns, result.to(pointer.dtype.element_ty), mask=columns < width)
