"""Profile some steps: a torch.profiler trace or ranges for Nsight Systems, and the history of GPU memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mkd.config.schema import LogConfig
from mkd.errors import Preempted, UsageError
from mkd.operations.phases import DATA, Follower

NSIGHT = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH")  # variables of the processes that they start
MEMORY_EVENTS = 100_000  # latest allocations that a history keeps


def profile_problems(log: LogConfig, world_size: int) -> Iterator[UsageError]:
    """Yield one error for each part of `log` that cannot be profiled on this machine or world size."""
    if log.record_memory_history and not torch.cuda.is_available():
        what, why = "--record-memory-history has no GPU to record", "the history is that of CUDA's allocator"
        yield UsageError(what, why, "remove it", code="gpu-missing")
    beyond = [rank for rank in log.profile_ranks if rank.isdigit() and int(rank) >= world_size]
    if beyond and (log.profile or log.record_memory_history):
        what = f"--profile-ranks {' '.join(beyond)} do not exist"
        why = f"the run has {world_size} processes"
        do = f"use ranks from 0 to {world_size - 1}"
        yield UsageError(what, why, do, code="out-of-range")


def is_under_nsight() -> bool:
    """Return True if Nsight Systems or Nsight Compute has started this process, which uses a GPU."""
    return torch.cuda.is_available() and any(name in os.environ for name in NSIGHT)


@dataclass
class Profiler(Follower):
    """Profiles the steps from `first` to `last`. On a rank that is not profiled it does nothing."""

    folder: Path
    rank: int
    first: int
    last: int
    traces: bool = False  # with torch.profiler
    # For Nsight Systems: the capture range, and an NVTX range for every phase in it.
    marks: bool = False
    remembers: bool = False  # records GPU memory until the end of the run
    _trace: Any = None  # the running torch.profiler.profile
    _is_marking: bool = False
    _is_in_range: bool = False  # an NVTX range is open
    _is_remembered: bool = False  # the history of the steps has been written

    @classmethod
    def from_config(cls, log: LogConfig, folder: Path, rank: int) -> Profiler:
        """Build the profiler of a rank, and start the history of GPU memory if the settings ask for it."""
        chosen = str(rank) in log.profile_ranks
        marks = chosen and log.profile and is_under_nsight()
        traces = chosen and log.profile and not marks
        first, last = map(int, log.profile_steps)
        remembers = chosen and log.record_memory_history
        profiler = cls(folder, rank, first, last, traces, marks, remembers)
        if profiler.remembers:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        return profiler

    def entered(self, phase: str, iteration: int) -> None:
        """Start or end the profile before a step, and open the NVTX range of the phase."""
        if phase == DATA:
            self.at(iteration - 1)
        self._close_range()
        if self._is_marking:
            torch.cuda.nvtx.range_push(f"{phase} {iteration}")
            self._is_in_range = True

    def left(self, phase: str, iteration: int) -> None:
        """Close the NVTX range of the phase."""
        self._close_range()

    def at(self, iteration: int) -> None:
        """Start or end the profile. `iteration` steps are done, and the next one is about to begin."""
        if self.first <= iteration + 1 <= self.last:
            self._start()
        elif iteration >= self.last:
            self._end_steps()

    def close(self, error: BaseException | None = None) -> None:
        """End and write what is running. After an `error` that includes the last allocations."""
        if self.remembers:
            has_failed = error is not None and not isinstance(error, Preempted)
            self._is_remembered = self._is_remembered and not has_failed
            self._write_history()
            self.remembers = False
            torch.cuda.memory._record_memory_history(enabled=None)
        self._end_steps()

    def _end_steps(self) -> None:
        self._write_history()
        if self._trace is not None:
            self._trace.stop()
            self._trace.export_chrome_trace(str(self._file("trace_rank{}.json.gz")))
            self._trace = None
        if self._is_marking:
            torch.cuda.cudart().cudaProfilerStop()
            self._is_marking = False

    def _write_history(self) -> None:
        if self.remembers and not self._is_remembered:
            torch.cuda.memory._dump_snapshot(str(self._file("memory_rank{}.pickle")))
            self._is_remembered = True

    def _close_range(self) -> None:
        if self._is_in_range:
            torch.cuda.nvtx.range_pop()
            self._is_in_range = False

    def _start(self) -> None:
        if self.traces and self._trace is None:
            self._trace = torch.profiler.profile(record_shapes=True)
            self._trace.start()
        if self.marks and not self._is_marking:
            torch.cuda.cudart().cudaProfilerStart()
            self._is_marking = True

    def _file(self, name: str) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / name.format(self.rank)
