"""Flags a step whose loss stands out from those before it. It only says so: training does not change."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

WINDOW = 64  # steps
MIN_STEPS = 16  # before that nothing is flagged
DEVIATIONS = 10.0  # robust standard deviations above the median ...
FACTOR = 1.5  # ... and this many times the median: what is flagged is worth a look
SIGMA = 1.4826  # standard deviation / median absolute deviation of a normal distribution


@dataclass
class SpikeDetector:
    """Median and median absolute deviation of the last losses: a few spikes among them hardly move either."""

    losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, loss: float) -> float | None:
        """`loss` / median of the steps before, if this step is a spike; None if not, or if `loss` is not finite."""
        if not math.isfinite(loss):
            return None
        ratio = self._ratio(loss) if len(self.losses) >= MIN_STEPS else None
        self.losses.append(loss)
        return ratio

    def _ratio(self, loss: float) -> float | None:
        middle = median(self.losses)
        deviation = SIGMA * median(abs(one - middle) for one in self.losses)
        is_spike = middle > 0 and loss > max(FACTOR * middle, middle + DEVIATIONS * deviation)
        return loss / middle if is_spike else None
