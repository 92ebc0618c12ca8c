"""Announce what a run is doing to its followers: watchdog, crash counter, profiler, stopper.

A run is always in one phase, and phases do not nest. A moment is a place inside a phase, such as
"before_pointer" while a checkpoint is saved. A save in the background announces its moments from another
thread, during any phase of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

INIT, DATA, FORWARD_BACKWARD, OPTIMIZER = "init", "data", "forward_backward", "optimizer"
READING = "reading the data"  # part of the start, before the models are built
ROLLOUT = "rollout"  # part of fetching the data of a step
WAITING = "waiting for the student"  # on a teacher's own processes, outside of forwards
EVAL, TASK_EVALUATION, SAVE, END = "eval", "task evaluation", "save", "end"


class Follower:
    """Base class of objects that follow a run. Override the methods you need."""

    def entered(self, phase: str, iteration: int) -> None:
        """Handle the start of `phase` of step `iteration`."""

    def left(self, phase: str, iteration: int) -> None:
        """Handle the end of a phase that was entered as a context, also if it failed."""

    def passed(self, moment: str, iteration: int) -> None:
        """Handle a moment. May be called from another thread than the main one."""


class Phases:
    """The phases of one run, and their followers. Calling it enters a phase as a context."""

    def __init__(self, *followers: Follower):
        self._followers = list(followers)

    def follow(self, follower: Follower) -> None:
        """Announce all further phases and moments to `follower` too."""
        self._followers.append(follower)

    @contextmanager
    def __call__(self, phase: str, iteration: int) -> Iterator[None]:
        """Enter `phase`, and leave it at the end of the block."""
        self.enter(phase, iteration)
        try:
            yield
        finally:
            for follower in self._followers:
                follower.left(phase, iteration)

    def enter(self, phase: str, iteration: int) -> None:
        """Announce that `phase` begins. Entering the same phase again counts as progress."""
        for follower in self._followers:
            follower.entered(phase, iteration)

    def each(self, phase: str, iteration: int, steps: Iterable[T]) -> Iterator[T]:
        """Yield `steps`, and enter `phase` again before each of them."""
        for step in steps:
            self.enter(phase, iteration)
            yield step

    def moment(self, name: str, iteration: int) -> None:
        """Announce a moment inside a phase."""
        for follower in self._followers:
            follower.passed(name, iteration)
