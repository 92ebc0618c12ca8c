"""Profiles of some steps: a trace of torch.profiler or a range for Nsight Systems, and the history of GPU memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mkd.config.schema import LogConfig
from mkd.errors import Preempted, UsageError

MEMORY_EVENTS = 100_000  # the latest allocations that a history keeps


def profile_problems(log: LogConfig, world_size: int) -> list[UsageError]:
    """What this machine or this world cannot profile."""
    problems = []
    if not torch.cuda.is_available():
        if log.profile and not log.use_pytorch_profiler:
            why = "without --use-pytorch-profiler it marks steps for Nsight Systems, which needs a GPU"
            problems.append(
                UsageError(
                    "--profile has no GPU to profile",
                    why,
                    "add --use-pytorch-profiler",
                    code="profile-without-gpu",
                )
            )
        if log.record_memory_history:
            why = "the history is that of CUDA's allocator"
            problems.append(
                UsageError(
                    "--record-memory-history has no GPU to record",
                    why,
                    "remove it",
                    code="memory-history-without-gpu",
                )
            )
    if log.profile or log.record_memory_history:
        beyond = [rank for rank in log.profile_ranks if rank.isdigit() and int(rank) >= world_size]
        if beyond:
            what = f"--profile-ranks {' '.join(beyond)} do not exist"
            problems.append(
                UsageError(
                    what,
                    f"the run has {world_size} processes",
                    f"use ranks from 0 to {world_size - 1}",
                    code="profile-ranks-beyond-world",
                )
            )
    return problems


@dataclass
class Profiler:
    """Told where the run stands before every step; on a rank that is not profiled it does nothing."""

    folder: Path
    rank: int
    first: int  # the steps after this iteration ...
    last: int  # ... up to this one
    traces: bool = False  # by torch.profiler
    marks: bool = False  # for Nsight Systems
    remembers: bool = False  # GPU memory, to the end of the run
    _trace: Any = None  # the running torch.profiler.profile
    _is_marking: bool = False
    _is_remembered: bool = False  # the history of the steps is written

    @classmethod
    def of(cls, log: LogConfig, folder: Path, rank: int) -> Profiler:
        """From the configuration; starts the history of GPU memory where one is wanted."""
        chosen = str(rank) in log.profile_ranks
        profiler = cls(
            folder,
            rank,
            first=log.profile_step_start,
            last=log.profile_step_end,
            traces=chosen and log.profile and log.use_pytorch_profiler,
            marks=chosen and log.profile and not log.use_pytorch_profiler,
            remembers=chosen and log.record_memory_history,
        )
        if profiler.remembers:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        return profiler

    def at(self, iteration: int) -> None:
        """`iteration` steps are done, and the next one is about to begin."""
        if self.first <= iteration < self.last:
            self._start()
        elif iteration >= self.last:
            self._end_steps()

    def close(self, error: BaseException | None = None) -> None:
        """End what is running, and write it. The history of a run that fails with `error`, whenever, is that of its end."""
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
