"""Time work on the device without waiting for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class Stopwatch:
    """Adds up the time of blocks: on a GPU between events in its stream, on a CPU by the clock."""

    _spans: list = field(default_factory=list)  # (start, end) of each block since the last reading

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        start = _mark(device)
        yield
        self._spans.append((start, _mark(device)))

    def take_ms(self) -> float:
        """Return the milliseconds of the blocks since the last call.

        On a GPU, wait for the end of the last block.
        """
        spans, self._spans = self._spans, []
        if spans and isinstance(spans[-1][1], torch.cuda.Event):
            spans[-1][1].synchronize()
            return sum(start.elapsed_time(end) for start, end in spans)
        return 1000 * sum(end - start for start, end in spans)


def _mark(device: torch.device) -> torch.cuda.Event | float:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
