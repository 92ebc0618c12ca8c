"""The merge of row statistics over vocabulary shards as one Triton kernel (torch: `merge_statistics`)."""

from __future__ import annotations

import triton
import triton.language as tl

from mkd.losses.triton.triton_divergences import LN2, LOG2E


@triton.jit
def _merge_softmax(row, k, n, MAXIMUM: tl.constexpr, TOTAL: tl.constexpr, scale, inside, TP: tl.constexpr):
    """Return (maximum, total) over all shards of statistics MAXIMUM and TOTAL; `scale` is log2(e) / T."""
    maximum = tl.load(row + MAXIMUM * n, mask=inside, other=0.0)
    for shard in tl.static_range(1, TP):
        maximum = tl.maximum(maximum, tl.load(row + (shard * k + MAXIMUM) * n, mask=inside, other=0.0))
    total = tl.zeros_like(maximum)
    for shard in tl.static_range(TP):
        local = tl.load(row + (shard * k + MAXIMUM) * n, mask=inside, other=0.0)
        total += tl.load(row + (shard * k + TOTAL) * n, mask=inside, other=1.0) * tl.exp2(
            (local - maximum) * scale
        )
    return maximum, total


@triton.jit
def _merge_mean(
    row, k, n, MAXIMUM: tl.constexpr, TOTAL: tl.constexpr, MEAN: tl.constexpr, OTHER: tl.constexpr,
    maximum, total, other, inverse_temperature, inside, TP: tl.constexpr,
):  # fmt: skip
    """Return the mean of (z - max) / T over the whole vocabulary under one model.

    Statistic MEAN holds each shard's mean of its own centred values. If OTHER >= 0, subtract the same mean of
    the other model's logits.
    """
    mean = tl.zeros_like(maximum)
    for shard in tl.static_range(TP):
        shift = tl.load(row + (shard * k + MAXIMUM) * n, mask=inside, other=0.0) - maximum
        share = tl.load(row + (shard * k + TOTAL) * n, mask=inside, other=1.0) * tl.exp2(
            shift * inverse_temperature * LOG2E
        )
        if OTHER >= 0:
            shift -= tl.load(row + (shard * k + OTHER) * n, mask=inside, other=0.0) - other
        mean += share / total * (
            tl.load(row + (shard * k + MEAN) * n, mask=inside, other=0.0) + shift * inverse_temperature
        )
    return mean


@triton.jit
def merge_kernel(
    gathered_pointer,  # [tp, k, n] fp32
    out_pointer,  # [12, n] fp32, rows as `triton_rows.MERGED`
    k, n, inverse_temperature, forward, reverse,
    HAS_KD: tl.constexpr, HAS_CE: tl.constexpr, OWN_CE_SOFTMAX: tl.constexpr, HOT: tl.constexpr,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr, TP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Do as `statistics.merge_statistics`: row values of the whole vocabulary from all shards' statistics."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < n
    row, out = gathered_pointer + rows, out_pointer + rows
    scale = inverse_temperature * LOG2E
    NEXT: tl.constexpr = 4 + FORWARD + REVERSE
    MEAN: tl.constexpr = NEXT + HOT
    LABEL: tl.constexpr = (MEAN + 3 if HAS_KD else 0) + (2 if OWN_CE_SOFTMAX else 0)
    if HAS_KD:
        m_s, s_s = _merge_softmax(row, k, n, 0, 1, scale, inside, TP)
        m_t, s_t = _merge_softmax(row, k, n, 2, 3, scale, inside, TP)
        log_s, log_t, kd = tl.log2(s_s) * LN2, tl.log2(s_t) * LN2, tl.zeros_like(m_s)
        if FORWARD:
            mean = _merge_mean(row, k, n, 2, 3, 4, 0, m_t, s_t, m_s, inverse_temperature, inside, TP)
            kd += forward * (mean - log_t + log_s)
        if REVERSE:
            CROSS: tl.constexpr = 4 + FORWARD
            mean = _merge_mean(row, k, n, 0, 1, CROSS, 2, m_s, s_s, m_t, inverse_temperature, inside, TP)
            kd += reverse * (mean - log_s + log_t)
            tl.store(out + 4 * n, mean - log_s + log_t, mask=inside)
        plain, log_plain = s_t, log_t
        if HOT:
            _m, plain = _merge_softmax(row, k, n, 2, NEXT, LOG2E, inside, TP)
            log_plain = tl.log2(plain) * LN2
        PLAIN: tl.constexpr = NEXT if HOT else 3
        mean = _merge_mean(row, k, n, 2, PLAIN, MEAN, -1, m_t, plain, m_t, 1.0, inside, TP)
        label = tl.load(row + (MEAN + 1) * n, mask=inside, other=0.0)
        best = tl.load(row + 2 * n, mask=inside, other=0.0)
        at_top = tl.load(row + (MEAN + 2) * n, mask=inside, other=0.0)
        for shard in tl.static_range(1, TP):
            label = tl.maximum(label, tl.load(row + (shard * k + MEAN + 1) * n, mask=inside, other=0.0))
            local = tl.load(row + (shard * k + 2) * n, mask=inside, other=0.0)
            found = tl.load(row + (shard * k + MEAN + 2) * n, mask=inside, other=0.0)
            at_top = tl.where(local > best, found, at_top)
            best = tl.maximum(best, local)
        tl.store(out, m_s, mask=inside)
        tl.store(out + n, log_s, mask=inside)
        tl.store(out + 2 * n, m_t, mask=inside)
        tl.store(out + 3 * n, log_t, mask=inside)
        tl.store(out + 8 * n, tl.maximum(kd, 0.0), mask=inside)  # rounding alone makes it negative
        tl.store(out + 9 * n, log_plain - (label - m_t), mask=inside)
        tl.store(out + 10 * n, log_plain - mean, mask=inside)
        tl.store(out + 11 * n, tl.where(at_top == m_s, 1.0, 0.0), mask=inside)
    if HAS_CE:
        if OWN_CE_SOFTMAX:
            m_s, s_s = _merge_softmax(row, k, n, LABEL - 2, LABEL - 1, LOG2E, inside, TP)
            log_s = tl.log2(s_s) * LN2
        label = tl.load(row + LABEL * n, mask=inside, other=0.0)
        for shard in tl.static_range(1, TP):
            label = tl.maximum(label, tl.load(row + (shard * k + LABEL) * n, mask=inside, other=0.0))
        tl.store(out + 5 * n, m_s, mask=inside)
        tl.store(out + 6 * n, log_s, mask=inside)
        tl.store(out + 7 * n, log_s - (label - m_s), mask=inside)
