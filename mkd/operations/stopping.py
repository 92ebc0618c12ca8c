"""Reasons to stop before the last step, agreed by all ranks: signals, and the end of the time that the run has."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

from mkd.operations.signals import Signals
from mkd.parallel.context import ParallelContext

T = TypeVar("T")

SLURM_END = "SLURM_JOB_END_TIME"  # s since the epoch
SAFETY = 1.5  # of the longest step and save so far: the next ones may take longer
SAVE_BYTES_PER_S = (
    250e6  # that a save is trusted with before one was timed: one disk, or a file server that others use too
)


@dataclass(frozen=True)
class Stop:
    """Why a run ends early."""

    reason: str
    is_preempted: bool  # by others, so that it should be started again; else as its own flags say


@dataclass
class Stopper:
    """Asked by all ranks at the same places, it answers the same on all of them."""

    context: ParallelContext
    signals: Signals
    exit_duration_in_mins: float | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    start: float = field(default_factory=time.time)  # s since the epoch
    step_s: float = 0.0  # the longest so far ...
    save_s: float = 0.0  # ... of each
    first_save_bytes: float = 0.0  # size of the checkpoint that the run makes first; 0: it makes none
    stop: Stop | None = None  # what the ranks last agreed on

    def agreed(self) -> Stop | None:
        """Whether some rank wants to stop, asked between steps."""
        self.all_finite(True)
        return self.stop

    def all_finite(self, is_finite: bool) -> bool:
        """Whether loss and gradient are finite on all ranks; `stop` then says whether some rank wants to stop.

        Asked in every step before its update: one all-reduce MAX of four numbers, small enough not to be seen, for both.
        """
        wishes = [
            self.signals.received,
            self._is_over(self._own_end()),
            self._is_over(self._slurm_end()),
            not is_finite,
        ]
        flags = torch.tensor(wishes, dtype=torch.int32, device=self.context.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        number, own_time, slurm_time, some_non_finite = flags.tolist()
        self.stop = None
        if number:
            self.stop = Stop(f"received {signal.Signals(number).name}", is_preempted=True)
        elif slurm_time:
            self.stop = Stop("the Slurm job is about to end", is_preempted=True)
        elif own_time:
            self.stop = Stop("the time of --exit-duration-in-mins is over", is_preempted=False)
        return not some_non_finite

    def took(self, step_s: float = 0.0, save_s: float = 0.0) -> None:
        """Take note of how long a step or a save took."""
        self.step_s, self.save_s = max(self.step_s, step_s), max(self.save_s, save_s)

    def _next_save_s(self) -> float:
        """A guess until one was made, and nothing before the first step: every start of a run gets on."""
        if self.save_s or not self.step_s:
            return self.save_s
        return self.first_save_bytes / SAVE_BYTES_PER_S

    def _own_end(self) -> float | None:
        """None before the first step: every start of a run gets on, however short its time."""
        if self.exit_duration_in_mins is None or not self.step_s:
            return None
        return self.start + 60 * self.exit_duration_in_mins

    def _slurm_end(self) -> float | None:
        end = self.environment.get(SLURM_END, "")
        return float(end) if end.isdigit() else None

    def _is_over(self, end: float | None) -> bool:
        """Whether one more step, and a save, might not fit before `end`."""
        return end is not None and time.time() + SAFETY * (self.step_s + self._next_save_s()) >= end


@dataclass
class Interruptible(Iterable[T]):
    """The same steps, until all ranks agree to stop before one of them; then `stop` says why."""

    steps: Iterable[T]
    stopper: Stopper | None  # None: nothing stops them
    stop: Stop | None = None

    def __iter__(self) -> Iterator[T]:
        for step in self.steps:
            self.stop = self.stopper and self.stopper.agreed()
            if self.stop:
                return
            yield step
