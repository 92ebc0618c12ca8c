"""Stop before the last step, or save by time: on signals and clocks. All ranks agree on it.

`StopNotice` keeps the words for what a signal would do now.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from mkd.checkpoint.folders import iteration_folder
from mkd.human import counted, duration
from mkd.operations.phases import (
    END,
    EVAL,
    FORWARD_BACKWARD,
    INIT,
    OPTIMIZER,
    READING,
    ROLLOUT,
    SAVE,
    TASK_EVALUATION,
    Follower,
)
from mkd.operations.signals import Signals
from mkd.parallel.context import ParallelContext

T = TypeVar("T")

SLURM_END = "SLURM_JOB_END_TIME"  # s since the epoch
SAFETY = 1.5  # factor on the longest step and save so far, because the next ones may take longer
MAX_SAVE_SHARE = 0.03  # of the time, that saves by time may take unless the user gives an interval
SAVE_BYTES_PER_S = 250e6  # assumed until a save has been timed: one disk, or a file server with other users
SAVED = "after_pointer"  # the moment of a save from which a run could resume


@dataclass(frozen=True)
class Stop:
    """The reason why a run ends early."""

    reason: str
    is_preempted: bool  # ended from outside, so that it should be restarted; False: its own flags end it


class StepAgreement(NamedTuple):
    """The agreement of all ranks before the update of a step."""

    finite: bool  # loss and gradients are finite on every rank, so that the update is applied
    stop: Stop | None = None  # why the run ends after this step; None: it continues


def without_peers(is_finite: bool) -> StepAgreement:
    """Return the agreement for a step outside of a run, where all ranks see the same values."""
    return StepAgreement(is_finite)


@dataclass
class Stopper(Follower):
    """Decides when a run stops. All ranks ask it at the same places and get the same answer."""

    context: ParallelContext
    signals: Signals
    exit_duration_in_mins: float | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    start: float = field(default_factory=time.time)  # s since the epoch
    step_s: float = 0.0  # the longest step so far
    save_s: float = 0.0  # the longest save so far
    first_save_bytes: float = 0.0  # size of the run's first checkpoint; 0: it saves none
    save_interval_in_mins: float = 0.0  # between saves by time; 0: there are none
    slow_saves_are_rare: bool = False  # if so, the interval is longer where saves take long
    save_is_due: bool = False  # by time, in the latest agreement of the ranks
    stop: Stop | None = None  # the latest agreement of the ranks
    _iteration: int = -1  # of the latest step
    _begun: float = 0.0  # its start, on the monotonic clock
    _is_under_way: bool = False
    _saved: float = field(default_factory=time.monotonic)  # end of the latest save, or the start

    def agreed(self) -> Stop | None:
        """Return why the run stops, if some rank wants to; None: it continues. Call it between steps."""
        return self.exchange(True).stop

    def exchange(self, is_finite: bool) -> StepAgreement:
        """Tell all ranks if loss and gradient are finite here, and return the agreement. All-reduce MAX."""
        if self._is_under_way:
            self.took(step_s=time.monotonic() - self._begun)
        ends = self._is_over(self._own_end()), self._is_over(self._slurm_end())
        wishes = [self.signals.received, *ends, self._is_save_due(), not is_finite]
        flags = torch.tensor(wishes, dtype=torch.int32, device=self.context.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        number, own_time, slurm_time, self.save_is_due, some_non_finite = flags.tolist()
        self.stop = None
        if number:
            self.stop = Stop(f"received {signal.Signals(number).name}", is_preempted=True)
        elif slurm_time:
            self.stop = Stop(f"the Slurm job is about to end ({SLURM_END})", is_preempted=True)
        elif own_time:
            self.stop = Stop("the time of --exit-duration-in-mins is over", is_preempted=False)
        return StepAgreement(not some_non_finite, self.stop)

    def took(self, step_s: float = 0.0, save_s: float = 0.0) -> None:
        """Record how long a step or a save took."""
        self.step_s, self.save_s = max(self.step_s, step_s), max(self.save_s, save_s)

    def saved(self) -> None:
        """Start the clock of saves by time again: the run has just saved, for whatever reason."""
        self._saved = time.monotonic()

    @property
    def note(self) -> str | None:
        """A line about an end of the Slurm job that has passed; None if there is nothing to tell."""
        end = self.environment.get(SLURM_END, "")
        if not end.isdigit() or self._slurm_end() is not None:
            return None
        ago = duration(self.start - float(end))
        return (
            f"{SLURM_END} is ignored: it passed {ago} before this start. Either the limit of the "
            "job was extended, or the variable is left from another job"
        )

    def entered(self, phase: str, iteration: int) -> None:
        """Start the clock of a step, when its completions are sampled or else when it begins to train.

        Further updates of an iteration belong to the same step.
        """
        if phase not in (ROLLOUT, FORWARD_BACKWARD) or self._is_under_way:
            return
        if iteration != self._iteration:
            self._iteration, self._begun = iteration, time.monotonic()
        self._is_under_way = True

    def left(self, phase: str, iteration: int) -> None:
        """Stop the clock of a step."""
        if phase == OPTIMIZER and self._is_under_way:
            self.took(step_s=time.monotonic() - self._begun)
            self._is_under_way = False

    def _next_save_s(self) -> float:
        """Return the longest save, or an estimate before it. Return 0 before the first step."""
        if self.save_s or not self.step_s:
            return self.save_s
        return self.first_save_bytes / SAVE_BYTES_PER_S

    def _own_end(self) -> float | None:
        """Return the end that --exit-duration-in-mins sets. Every start makes a step first."""
        if self.exit_duration_in_mins is None or not self.step_s:
            return None
        return self.start + 60 * self.exit_duration_in_mins

    def _slurm_end(self) -> float | None:
        """Return the end that Slurm has set. One before the start is not the end of a job that runs."""
        end = self.environment.get(SLURM_END, "")
        return float(end) if end.isdigit() and float(end) > self.start else None

    def _is_save_due(self) -> bool:
        """Return True if a save by time is due."""
        interval_s = 60 * self.save_interval_in_mins
        if self.slow_saves_are_rare:
            interval_s = max(interval_s, self.save_s / MAX_SAVE_SHARE)
        return self.save_interval_in_mins > 0 and time.monotonic() - self._saved >= interval_s

    def _is_over(self, end: float | None) -> bool:
        """Return True if one more step and a save might not finish before `end`."""
        return end is not None and time.time() + SAFETY * (self.step_s + self._next_save_s()) >= end


@dataclass
class Interruptible(Iterable[T]):
    """Yields the same steps until all ranks agree to stop before one of them. Then `stop` says why."""

    steps: Iterable[T]
    stopper: Stopper | None  # None: nothing stops the steps
    stop: Stop | None = None

    def __iter__(self) -> Iterator[T]:
        for step in self.steps:
            self.stop = self.stopper and self.stopper.agreed()
            if self.stop:
                return
            yield step


@dataclass
class StopNotice(Follower):
    """Keeps the texts of `signals` up to date, so that a thread can print them at any time."""

    signals: Signals
    save: str | None  # folder of checkpoints; None: the run saves nothing
    kept_iteration: int = 0  # of `kept_in`
    kept_in: Path | None = None  # the checkpoint from which it could resume

    def entered(self, phase: str, iteration: int) -> None:
        """Describe a stop during `phase` of step `iteration`."""
        if phase in (INIT, READING):
            return
        then = ", then saving" if self.save else "; --no-save: nothing is saved"
        if phase == SAVE:
            self.signals.notice = f"stopping when iteration {iteration} is saved"
        elif phase in (EVAL, TASK_EVALUATION):
            self.signals.notice = f"stopping after this batch of the evaluation{then}"
        elif phase == END:
            self.signals.notice = "the training is over: the run ends after its last files are written"
        else:
            self.signals.notice = f"stopping after step {iteration}{then}"
        steps = iteration - self.kept_iteration
        self.signals.lost = f" and lose {counted(steps, 'step')}" if steps > 0 else ""
        self._describe_kept()

    def passed(self, moment: str, iteration: int) -> None:
        """Notice that a checkpoint is complete."""
        if moment == SAVED and self.save:
            self.keep(iteration_folder(Path(self.save), iteration), iteration)

    def keep(self, folder: Path, iteration: int) -> None:
        """Remember the checkpoint from which the run resumes, or that it has just saved."""
        self.kept_in, self.kept_iteration = folder, iteration
        self._describe_kept()

    def _describe_kept(self) -> None:
        is_kept, folder = self.kept_in is not None, self.kept_in or Path()
        text = f"{folder} is saved: --load {folder.parent} resumes there"
        self.signals.kept = text if is_kept else "nothing of this run is saved"
