"""The settings of a teacher whose weights average those of the student."""

from __future__ import annotations

from dataclasses import dataclass

from mkd.config.field import Range, option


@dataclass(frozen=True)
class EMAConfig:
    """A moving average of the student's weights: q <- (1 - rate) q + rate x the student's."""

    rate: float = option(
        0.01,
        "share of the student's weights in each move of the average. After ln(2) / rate moves, half of what "
        "the teacher was is left",
        flag=False,
        valid=Range("above 0, up to 1", lambda x: 0 < x <= 1),
    )
    every: int = option(
        1,
        "updates of the student for one move of the average. Skipped updates do not count",
        flag=False,
        valid=Range("1 or more", lambda x: x >= 1),
    )
