"""Rank 0 prepares the data, the others wait: for as long as it gets on, and nobody misses a signal."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mkd.checkpoint.folders import TrainingPosition, named_by_pointer, position_of, read_state
from mkd.errors import CheckpointError, Preempted
from mkd.operations.markers import PREEMPTED, remove_markers, write_marker
from mkd.operations.signals import Signals
from mkd.operations.watchdog import Watchdog
from mkd.parallel.context import ParallelContext

BEAT_S = 0.5  # between two words of rank 0 to those that wait


@dataclass
class SharedBuild:
    """`progress` is for rank 0, often, while it builds; `share` for all ranks, once, when it has."""

    context: ParallelContext
    signals: Signals
    watchdog: Watchdog
    _last_beat: float = 0.0

    def progress(self) -> None:
        """A piece is done. Raises Preempted where some rank was told to end."""
        self.watchdog.enter("init", 0)
        if self.signals.received or time.monotonic() - self._last_beat > BEAT_S:
            self._beat(is_done=False)

    def share(self, value: Any) -> Any:
        """The picklable `value` of rank 0, on every rank. Collective: the others wait in it for the end of the build."""
        is_done = self.context.rank == 0
        while not self._beat(is_done):
            self.watchdog.enter("init", 0)
        self.watchdog.enter("init", 0)
        return self.context.broadcast_object(value)

    def _beat(self, is_done: bool) -> bool:
        """Whether rank 0 is done: an all-reduce MAX of two numbers. On rank 0 raises Preempted while it is not."""
        flags = torch.tensor([self.signals.received, is_done], dtype=torch.int32, device=self.context.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        number, all_done = flags.tolist()
        self._last_beat = time.monotonic()
        if self.context.rank == 0 and number and not all_done:
            raise Preempted(
                f"received {signal.Signals(number).name}",
                "data were being prepared: what was tokenised of an unfinished file is lost, finished ones are in the cache",
                "start the same command again",
                code="preempted-while-building",
            )
        return bool(all_done)


def leave_preempted(save: str | None, stop: Preempted) -> None:
    """For rank 0: the marker of a run that ends before it knows where it stands."""
    if save:
        try:
            latest = named_by_pointer(Path(save))
            position = position_of(read_state(latest)) if latest else TrainingPosition()
        except CheckpointError:  # for the next start to find and to say
            position = TrainingPosition()
        remove_markers(Path(save))
        write_marker(Path(save), PREEMPTED, position, stop.what)
