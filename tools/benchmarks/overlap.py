"""Measure how much of some kernels runs beside others, from a profile or from intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

Interval = tuple[float, float]  # start and end


@dataclass(frozen=True)
class Overlap:
    """Times of the kernels of one call, in ms."""

    transfer_ms: float  # time in which a transfer runs
    exposed_ms: float  # the part of it in which nothing else runs
    busy_ms: float  # time in which anything runs
    span_ms: float  # from the start of the first kernel to the end of the last one

    def describe(self) -> str:
        """Return the times as one line."""
        share = 1 - self.exposed_ms / self.transfer_ms if self.transfer_ms else 1.0
        return (
            f"transfers {self.transfer_ms:.1f} ms, of which {share:.3f} beside other kernels; GPU busy "
            f"{self.busy_ms:.1f} of {self.span_ms:.1f} ms"
        )


def overlap_of(transfers: Iterable[Interval], others: Iterable[Interval]) -> Overlap:
    """Compare the intervals of transfers with those of all other kernels, in us."""
    moved, computed = _merged(transfers), _merged(others)
    both = _merged([*moved, *computed])
    exposed = _length(both) - _length(computed)
    span = both[-1][1] - both[0][0] if both else 0.0
    return Overlap(*(us / 1000 for us in (_length(moved), exposed, _length(both), span)))


def profile_overlap(run: Callable[[], object], names: Sequence[str]) -> Overlap:
    """Profile one call on the GPU. Kernels and copies whose names contain one of `names` are transfers."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    transfers, others = [], []
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            is_transfer = any(name in event.name for name in names)
            (transfers if is_transfer else others).append((event.time_range.start, event.time_range.end))
    return overlap_of(transfers, others)


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, in order and apart."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _length(merged: Sequence[Interval]) -> float:
    return sum(end - start for start, end in merged)
