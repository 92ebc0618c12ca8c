"""Measure what the CPU does in a step: how long it needs to start the GPU's work, and with what."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tools.benchmarks.benchmark_report import table
from tools.benchmarks.kernel_times import KernelTimes, kernel_times

LISTED = 25  # operations that a profile lists


@dataclass
class Collections:
    """Garbage collections of Python."""

    ms: list[float] = field(default_factory=list)
    _begin: float = 0.0

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        """Take note of the begin or the end of one; see `gc.callbacks`."""
        if phase == "start":
            self._begin = time.perf_counter()
        else:
            self.ms.append(1000 * (time.perf_counter() - self._begin))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count the collections inside the block."""
        gc.callbacks.append(self)
        try:
            yield
        finally:
            gc.callbacks.remove(self)


@dataclass(frozen=True)
class StepProfile:
    """One step of this rank, in ms."""

    wall_ms: float  # without a profiler
    kernels: KernelTimes
    collections: Collections
    operations: list[tuple[str, float, int]]  # torch's on the CPU, longest first: name, own ms, calls

    def describe(self, name: str) -> str:
        """Return the profile as lines of text."""
        kinds = sorted(self.kernels.by_kind.items(), key=lambda item: -item[1])
        collections = self.collections.ms
        lines = [
            f"{name}: {self.wall_ms:.1f} ms, of which kernels run in {self.kernels.busy_ms:.1f}",
            "  kernels, ms: " + ", ".join(f"{kind} {ms:.1f}" for kind, ms in kinds),
            f"  garbage collections: {len(collections)} in {sum(collections):.1f} ms",
        ]
        operations_ms = sum(ms for _, ms, _ in self.operations)
        title = f"  operations of torch on the CPU, without Python: {operations_ms:.1f} ms"
        rows = [[key[:70], f"{ms:.1f}", str(calls)] for key, ms, calls in self.operations[:LISTED]]
        return "\n".join(lines) + "\n" + table(title, ["", "ms", "calls"], rows)


def step_profile(step: Callable[[], object], is_cuda: bool) -> StepProfile:
    """Run the step three times: alone, with its kernels recorded, and with the operations of the CPU."""
    collections = Collections()
    with collections.watched():
        begin = time.perf_counter()
        step()
        if is_cuda:
            torch.cuda.synchronize()
        wall_ms = 1000 * (time.perf_counter() - begin)
    kernels = kernel_times(step, is_cuda)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    averages = sorted(profiled.key_averages(), key=lambda one: -one.self_cpu_time_total)
    operations = [(one.key, one.self_cpu_time_total / 1000, one.count) for one in averages]
    return StepProfile(wall_ms, kernels, collections, operations)
