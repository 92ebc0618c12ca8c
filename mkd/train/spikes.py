"""Flag a step whose loss stands out from the steps before it. Training itself does not change."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from mkd.data.dataset import BlendedDataset
from mkd.operations.event_log import SPIKE
from mkd.train.nonfinite import append_line, documents_by_sample, shown
from mkd.train.step import StepResult

WINDOW = 64  # steps
MIN_STEPS = 16  # no step is flagged before that
DEVIATIONS = 10.0  # a spike is this many robust standard deviations above the median
FACTOR = 1.5  # and this many times the median, so that only notable steps are flagged
SIGMA = 1.4826  # standard deviation / median absolute deviation of a normal distribution
LOG = logging.getLogger("mkd")


@dataclass
class SpikeDetector:
    """Compares losses with the median and median absolute deviation of the last ones, robust to spikes."""

    losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, loss: float) -> float | None:
        """Return `loss` / median of the earlier steps if this step is a spike, else None."""
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


@dataclass
class SpikeWatch:
    """Checks every step; prints and lists a spike with the samples of its step."""

    dataset: BlendedDataset
    file: Path | None  # on rank 0: the spikes, one JSON line each
    detector: SpikeDetector = field(default_factory=SpikeDetector)

    def is_spike(self, iteration: int, result: StepResult, samples: Callable[[], list[int]]) -> bool:
        """Return True if the loss stands out; only then call `samples`, for the samples of all ranks."""
        sums = result.sums.token_sums()
        loss = sums["loss"] / max(1, sums["num_loss_tokens"])
        ratio = self.detector.add(loss) if result.is_applied else None
        if ratio is None:
            return False
        if self.file is not None:
            ids = samples()
            what = f"{loss:.6g} is {ratio:.1f} times the median of the steps before it"
            text = f"loss spike at iteration {iteration}: {what}; samples of the step: {shown(ids)}"
            LOG.warning(text, extra={"event": SPIKE})
            record = {"iteration": iteration, "loss": loss, "ratio": ratio, "sample_ids": sorted(ids)}
            record["documents"] = documents_by_sample(self.dataset, ids)
            append_line(self.file, record)
        return True
