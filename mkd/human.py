"""Numbers as people read them."""

from __future__ import annotations

import math

MIB, GIB, TIB = 2**20, 2**30, 2**40


def fixed(value: float, width: int) -> str:
    """Return `value` in at most `width` columns, right-aligned, with as many decimals as fit, at most 4."""
    if math.isfinite(value):
        for decimals in range(min(4, width - 2), -1, -1):
            text = f"{value:.{decimals}f}"
            if len(text) <= width:
                return f"{text:>{width}}"
        return f"{value:>{width}.0e}"
    return f"{value:>{width}}"


def scientific(value: float) -> str:
    """Return `value` as 9.3e-4: two digits, and no zero before the exponent."""
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def count(number: float) -> str:
    """Return a count with two or three digits: 843, 2.6k, 130k, 1.2M."""
    if not math.isfinite(number):
        return "?"
    for unit in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.1f}{unit}" if unit and number < 9.95 else f"{number:.0f}{unit}"
        number /= 1000
    return f"{number:.0f}T" if number < 1e6 else f"{number:.0e}T"


def counted(number: float, noun: str) -> str:
    """Return a number with its noun: 1 step, 2.5 minutes, 1,000 batches."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,g} {noun}{ending}" if isinstance(number, float) else f"{number:,} {noun}{ending}"


def duration(seconds: float) -> str:
    """Return a duration: 43 ms, 2.4 s, 43 s, 12m05s, 3h07m, 2d14h."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms" if seconds else "0 s"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, left_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{left_s:02d}s"
    hours, left_min = divmod(round(seconds / 60), 60)
    if hours < 24:
        return f"{hours}h{left_min:02d}m"
    days, left_h = divmod(round(seconds / 3600), 24)
    return f"{days}d{left_h:02d}h" if days < 1000 else f"{days:.1e} d"


def tokens_per_s(tokens: int, seconds: float) -> str:
    """Return a rate: 3,235 tokens/s, 0.3 tokens/s."""
    rate = tokens / max(seconds, 1e-9)
    return f"{rate:,.0f} tokens/s" if rate >= 10 or not tokens else f"{rate:.2g} tokens/s"


def milliseconds(ms: float) -> str:
    """Return the time of a step: under 0.1 ms, 8.4 ms, 1620 ms, 43.8 s, 20m34s."""
    if 0 < ms < 0.1:
        return "under 0.1 ms"
    if ms < 9999.5:
        return f"{ms:.1f} ms".replace(".0 ms", " ms") if ms < 999.5 else f"{ms:.0f} ms"
    return f"{ms / 1000:.3g} s" if ms < 999500 else duration(ms / 1000)


def floating_point(operations: float) -> str:
    """Return a number of floating-point operations: 843 MFLOP, 25.5 TFLOP, 11.2 PFLOP, 3,400 EFLOP."""
    number, units = operations, ["", "k", "M", "G", "T", "P", "E"]
    while number >= 999.5 and len(units) > 1:
        number /= 1000
        units.pop(0)
    return f"{float(f'{number:.3g}'):,g} {units[0]}FLOP"


def gpu_hours(hours: float) -> str:
    """Return under 0.01 GPU-hours, 3.6 GPU-hours, 12,300 GPU-hours."""
    if 0 < hours < 0.01:
        return "under 0.01 GPU-hours"
    return f"{float(f'{hours:.3g}'):,g} GPU-hours" if hours < 999_500 else f"{hours:,.0f} GPU-hours"


def number(value: int) -> str:
    """Return a number of parameters or tokens: 107,500, 26.4 million, 8.191 billion, 2.1 trillion."""
    if value < 1_000_000:
        return f"{value:,}"
    for unit, name in ((1e12, "trillion"), (1e9, "billion")):
        if value >= unit:
            return f"{value / unit:.4g} {name}"
    return f"{value / 1e6:.4g} million"


def size(num_bytes: float) -> str:
    """Return a number of bytes in MiB, GiB or TiB."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes / MIB:.2f} MiB"
