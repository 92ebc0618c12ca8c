"""Triton kernels over the rows of vocabulary-sharded logits, launched by `triton_rows.py`.

A row is read in tiles of LANES x WIDTH columns. Every lane keeps a running softmax state of its own columns:
the maximum and sums relative to it. So the loop needs no communication between threads. Lanes merge once, at
the end of the row, by the formula that also merges ranks. With d = (z_t - m_t) - (z_s - m_s), new maxima m'
and f = e^((m - m') / T):

    S <- S f + sum e^((z - m') / T)
    C_t <- (C_t + S_t delta) f_t + sum e^((z_t - m_t') / T) d',    delta = (m_t - m_t') - (m_s - m_s')
    C_s <- (C_s - S_s delta) f_s - sum e^((z_s - m_s') / T) d'

(online softmax: Milakov and Gimelshein 2018, section 3; the cross terms follow by the same shift.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from mkd.losses.triton.triton_divergences import LN2, LOG2E, shard_gradient, shard_terms

LOWEST = tl.constexpr(-1e30)
NOWHERE = tl.constexpr(2147483647)


@triton.jit
def load_tile(row, columns, width, count, PARTIAL: tl.constexpr):
    """Return the fp32 logits of a tile.

    A PARTIAL tile has LOWEST from column `count` on; `width` (loadable columns, a multiple of the vector
    size) keeps its loads wide.
    """
    if PARTIAL:
        values = tl.load(row + columns, mask=columns < width, other=LOWEST).to(tl.float32)
        return tl.where(columns < count, values, LOWEST)
    return tl.load(row + columns).to(tl.float32)


@triton.jit
def add_to_softmax(maximum, total, tile, scale):
    """Add a tile to one model's running (maximum, total) of every lane; `scale` is log2(e) / T."""
    new = tl.maximum(maximum, tl.max(tile, axis=1))
    centred = tile - new[:, None]
    exps = tl.exp2(centred * scale)
    factor = tl.exp2((maximum - new) * scale)
    return new, total * factor + tl.sum(exps, axis=1), centred, exps, factor


@triton.jit
def _add_tile(
    state, student, teacher, first, tile, width, shared, scale,
    HOT: tl.constexpr, OWN_CE_SOFTMAX: tl.constexpr, FORWARD: tl.constexpr, REVERSE: tl.constexpr,
    PARTIAL: tl.constexpr,
):  # fmt: skip
    """Return the running state of both models' lanes after the tile that begins at column `first`."""
    old_m_s, old_s_s, old_m_t, old_s_t, c_t, c_s, plain_s, plain_t, mean_t, top = state
    columns = first + tile
    m_s, s_s, u_s, e_s, f_s = add_to_softmax(
        old_m_s, old_s_s, load_tile(student, columns, width, shared, PARTIAL), scale
    )
    m_t, s_t, u_t, e_t, f_t = add_to_softmax(
        old_m_t, old_s_t, load_tile(teacher, columns, width, shared, PARTIAL), scale
    )
    top = tl.where(m_t > old_m_t, first, top)
    d = u_t - u_s
    delta = (old_m_t - m_t) - (old_m_s - m_s)
    if FORWARD:
        c_t = (c_t + old_s_t * delta) * f_t + tl.sum(e_t * d, axis=1)
    if REVERSE:
        c_s = (c_s - old_s_s * delta) * f_s - tl.sum(e_s * d, axis=1)
    if HOT:
        p_t = tl.exp2(u_t * LOG2E)
        g_t = tl.exp2((old_m_t - m_t) * LOG2E)
        mean_t = (mean_t + plain_t * (old_m_t - m_t)) * g_t + tl.sum(p_t * u_t, axis=1)
        plain_t = plain_t * g_t + tl.sum(p_t, axis=1)
        if OWN_CE_SOFTMAX:
            g_s = tl.exp2((old_m_s - m_s) * LOG2E)
            plain_s = plain_s * g_s + tl.sum(tl.exp2(u_s * LOG2E), axis=1)
    else:
        mean_t = (mean_t + old_s_t * (old_m_t - m_t)) * f_t + tl.sum(e_t * u_t, axis=1)
    return m_s, s_s, m_t, s_t, c_t, c_s, plain_s, plain_t, mean_t, top


@triton.jit
def _store_kd_statistics(
    out, n, state, student, teacher, label, shared, lane, inverse_temperature,
    HOT: tl.constexpr, FORWARD: tl.constexpr, REVERSE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Merge a row's lanes, store the divergence's statistics, return the place of the next one."""
    m_s, s_s, m_t, s_t, c_t, c_s, _, plain_t, mean_t, top = state
    if not HOT:
        plain_t = s_t
    scale = inverse_temperature * LOG2E
    all_m_s, all_m_t = tl.max(m_s, axis=0), tl.max(m_t, axis=0)
    f_s, f_t = tl.exp2((m_s - all_m_s) * scale), tl.exp2((m_t - all_m_t) * scale)
    g_t = tl.exp2((m_t - all_m_t) * LOG2E)
    delta = (m_t - all_m_t) - (m_s - all_m_s)
    all_s_s, all_s_t = tl.sum(s_s * f_s, axis=0), tl.sum(s_t * f_t, axis=0)
    tl.store(out, all_m_s)
    tl.store(out + n, all_s_s)
    tl.store(out + 2 * n, all_m_t)
    tl.store(out + 3 * n, all_s_t)
    out += 4 * n
    if FORWARD:
        tl.store(out, _mean(tl.sum((c_t + s_t * delta) * f_t, axis=0) * inverse_temperature, all_s_t))
        out += n
    if REVERSE:
        tl.store(out, _mean(tl.sum((c_s - s_s * delta) * f_s, axis=0) * inverse_temperature, all_s_s))
        out += n
    all_plain_t = tl.sum(plain_t * g_t, axis=0)
    if HOT:
        tl.store(out, all_plain_t)
        out += n
    tl.store(out, _mean(tl.sum((mean_t + plain_t * (m_t - all_m_t)) * g_t, axis=0), all_plain_t))
    _store_label_logit(out + n, teacher, label, shared)
    # The largest teacher logit is among the WIDTH columns that a lane read when it last met a new maximum.
    group = tl.min(tl.where(m_t == all_m_t, top + lane * WIDTH, NOWHERE), axis=0) + tl.arange(0, WIDTH)
    candidates = tl.load(teacher + group, mask=group < shared, other=float("-inf")).to(tl.float32)
    best = tl.min(tl.where(candidates == all_m_t, group, NOWHERE), axis=0)
    tl.store(out + 2 * n, tl.load(student + best, mask=best < shared, other=0.0).to(tl.float32))
    return out + 3 * n


@triton.jit
def _store_label_logit(out, logits, label, count):
    """Store the label's logit if this shard owns the label, else -inf."""
    owned = (label >= 0) & (label < count)
    tl.store(out, tl.load(logits + label, mask=owned, other=float("-inf")).to(tl.float32))


@triton.jit
def statistics_kernel(
    student_pointer,  # [n, w]
    teacher_pointer,  # [n, w]
    label_pointer,  # [n] int64
    mask_pointer,  # [n] fp32
    out_pointer,  # [k, n] fp32, rows as `KDObjective.statistic_names`
    student_stride, teacher_stride, n, width, start, shared, student_columns, inverse_temperature,
    HAS_KD: tl.constexpr, HAS_CE: tl.constexpr, OWN_CE_SOFTMAX: tl.constexpr,
    HOT: tl.constexpr, FORWARD: tl.constexpr, REVERSE: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute all statistics of this shard in one pass, one program per row."""
    row = tl.program_id(0).to(tl.int64)
    student, teacher = student_pointer + row * student_stride, teacher_pointer + row * teacher_stride
    out = out_pointer + row
    has_loss = tl.load(mask_pointer + row) != 0.0
    shared, student_columns = tl.where(has_loss, shared, 0), tl.where(has_loss, student_columns, 0)
    label = tl.load(label_pointer + row) - start
    lane = tl.arange(0, LANES)
    tile = lane[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    scale = inverse_temperature * LOG2E
    zero, lowest = tl.zeros((LANES,), tl.float32), tl.full((LANES,), LOWEST, tl.float32)
    m_s, plain_s = lowest, zero  # the student's sum at T = 1 is relative to m_s
    if HAS_KD:
        state = (lowest, zero, lowest, zero, zero, zero, zero, zero, zero, tl.zeros((LANES,), tl.int32))
        whole = shared // (LANES * WIDTH) * (LANES * WIDTH)
        for first in range(0, whole, LANES * WIDTH):
            state = _add_tile(
                state, student, teacher, first, tile, width, shared, scale,
                HOT, OWN_CE_SOFTMAX, FORWARD, REVERSE, False,
            )
        if whole < shared:
            state = _add_tile(
                state, student, teacher, whole, tile, width, shared, scale,
                HOT, OWN_CE_SOFTMAX, FORWARD, REVERSE, True,
            )
        out = _store_kd_statistics(
            out, n, state, student, teacher, label, shared, lane, inverse_temperature,
            HOT, FORWARD, REVERSE, WIDTH,
        )
        m_s, plain_s = state[0], state[6] if HOT else state[1]
    if HAS_CE:
        if OWN_CE_SOFTMAX:
            first_extra = shared // WIDTH * WIDTH  # aligned loads; columns before `shared` are already known
            for first in range(first_extra, student_columns, LANES * WIDTH):
                columns = first + tile
                z_s = load_tile(student, columns, width, student_columns, True)
                z_s = tl.where(columns < shared, LOWEST, z_s)
                m_s, plain_s, _u, _e, _f = add_to_softmax(m_s, plain_s, z_s, LOG2E)
            ce_max = tl.max(m_s, axis=0)
            tl.store(out, ce_max)
            tl.store(out + n, tl.sum(plain_s * tl.exp2((m_s - ce_max) * LOG2E), axis=0))
            out += 2 * n
        _store_label_logit(out, student, label, student_columns)


@triton.jit
def _mean(total, count):
    return tl.where(count > 0.0, total / count, 0.0)


@triton.jit
def terms_kernel(
    student_pointer,  # [n, w]
    teacher_pointer,  # [n, w]
    mask_pointer,  # [n] fp32
    out_pointer,  # [2, n] fp32
    student_max_pointer,  # [n] of the whole vocabulary, and so on
    student_log_sum_pointer,
    teacher_max_pointer,
    teacher_log_sum_pointer,
    student_stride,
    teacher_stride,
    n,
    width,
    shared,
    inverse_temperature,
    first_number,  # of the divergence's `Formula`
    second_number,
    KIND: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Compute this shard's part of `Divergence.terms`, one program per row."""
    row = tl.program_id(0).to(tl.int64)
    student = student_pointer + row * student_stride
    teacher = teacher_pointer + row * teacher_stride
    shared = tl.where(tl.load(mask_pointer + row) != 0.0, shared, 0)
    m_s, l_s = tl.load(student_max_pointer + row), tl.load(student_log_sum_pointer + row)
    m_t, l_t = tl.load(teacher_max_pointer + row), tl.load(teacher_log_sum_pointer + row)
    scale, l_s, l_t = inverse_temperature * LOG2E, l_s * LOG2E, l_t * LOG2E
    tile = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    one = tl.zeros((LANES,), tl.float32)
    two = tl.zeros((LANES,), tl.float32)
    whole = shared // (LANES * WIDTH) * (LANES * WIDTH)
    for first in range(0, whole, LANES * WIDTH):
        a = (load_tile(student, first + tile, width, shared, False) - m_s) * scale - l_s
        b = (load_tile(teacher, first + tile, width, shared, False) - m_t) * scale - l_t
        of_tile, also = shard_terms(a, b, first_number, second_number, KIND)
        one += of_tile
        two += also
    if whole < shared:
        a = (load_tile(student, whole + tile, width, shared, True) - m_s) * scale - l_s
        b = (load_tile(teacher, whole + tile, width, shared, True) - m_t) * scale - l_t
        of_tile, also = shard_terms(a, b, first_number, second_number, KIND)
        one += of_tile
        two += also
    tl.store(out_pointer + row, tl.sum(one, axis=0) * LN2)
    tl.store(out_pointer + n + row, tl.sum(two, axis=0) * LN2)


@triton.jit
def gradient_kernel(
    student_pointer,  # [n, w]
    teacher_pointer,  # [n, w]
    out_pointer,  # [n, w], may be student_pointer
    label_pointer,  # [n] int64
    mask_pointer,  # [n] fp32
    weight_pointer,  # [n] fp32
    student_max_pointer, student_log_sum_pointer,  # [n] fp32 of the whole vocabulary, at T
    teacher_max_pointer, teacher_log_sum_pointer,
    residual_pointer,
    plain_max_pointer, plain_log_sum_pointer,  # [n] of the student at T = 1
    student_stride, teacher_stride, out_stride, width, start, shared, student_columns, inverse_temperature,
    kd_weight,
    ce_weight,
    first_number,  # of the divergence's `Formula`
    second_number,
    HAS_KD: tl.constexpr, HAS_CE: tl.constexpr, OWN_CE_SOFTMAX: tl.constexpr,
    KIND: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the logits, one program per row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    loadable = columns < width
    out = out_pointer + row * out_stride + columns
    if tl.load(mask_pointer + row) == 0.0:
        tl.store(out, tl.zeros((BLOCK,), out_pointer.dtype.element_ty), mask=loadable)
        return
    weight = tl.load(weight_pointer + row)
    z_s = tl.load(student_pointer + row * student_stride + columns, mask=loadable, other=0.0).to(tl.float32)
    gradient = tl.zeros((BLOCK,), tl.float32)
    if HAS_KD:
        z_t = tl.load(
            teacher_pointer + row * teacher_stride + columns, mask=loadable, other=0.0
        ).to(tl.float32)
        scale = inverse_temperature * LOG2E
        a = (
            (z_s - tl.load(student_max_pointer + row)) * scale
            - tl.load(student_log_sum_pointer + row) * LOG2E
        )
        b = (
            (z_t - tl.load(teacher_max_pointer + row)) * scale
            - tl.load(teacher_log_sum_pointer + row) * LOG2E
        )
        residual = tl.load(residual_pointer + row)
        gradient, p_s = shard_gradient(a, b, residual, first_number, second_number, KIND, FIRST, SECOND)
        gradient = tl.where(columns < shared, gradient * (weight * kd_weight), 0.0)
    if HAS_CE:
        if OWN_CE_SOFTMAX:
            p_s = tl.exp2(
                (z_s - tl.load(plain_max_pointer + row) - tl.load(plain_log_sum_pointer + row)) * LOG2E
            )
        label = tl.load(label_pointer + row) - start
        ce = p_s - tl.where(columns == label, 1.0, 0.0)
        gradient += tl.where(columns < student_columns, ce * (weight * ce_weight), 0.0)
    tl.store(out, gradient.to(out_pointer.dtype.element_ty), mask=loadable)
