"""Let rank 0 prepare the data while the others wait for as long as it makes progress.

Signals are noticed on all ranks meanwhile.
"""

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
from mkd.operations.phases import READING, Phases
from mkd.operations.run_folders import PREEMPTED, remove_markers, write_marker
from mkd.operations.signals import Signals
from mkd.parallel.context import ParallelContext

BEAT_S = 0.5  # between two messages of rank 0 to the waiting ranks


@dataclass
class SharedBuild:
    """A build on rank 0 that the other ranks wait for.

    Rank 0 calls `progress` often while it builds. All ranks call `share` once at the end of the build.
    """

    context: ParallelContext
    signals: Signals
    phases: Phases
    _last_beat: float = 0.0

    def progress(self) -> None:
        """Announce that a piece is done. Raise Preempted if some rank was told to end."""
        self.phases.enter(READING, 0)
        if self.signals.received or time.monotonic() - self._last_beat > BEAT_S:
            self._beat(is_done=False)

    def share(self, value: Any) -> Any:
        """Return the picklable `value` of rank 0 on every rank, when the build has ended. Collective."""
        is_done = self.context.rank == 0
        while not self._beat(is_done):
            self.phases.enter(READING, 0)
        self.phases.enter(READING, 0)
        return self.context.broadcast_object(value)

    def end_if_asked(self) -> None:
        """Raise Preempted on all ranks if one was told to end, before the models are loaded. Collective."""
        number = self._exchange(False)[0]
        if number:
            what = f"received {signal.Signals(number).name}"
            why = "no step was done: there is nothing to save"
            raise Preempted(what, why, "start the same command again", code="preempted")

    def _exchange(self, is_done: bool) -> list[int]:
        """Return the largest of (signal, is_done) over all ranks. All-reduce MAX."""
        flags = torch.tensor([self.signals.received, is_done], dtype=torch.int32, device=self.context.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return flags.tolist()

    def _beat(self, is_done: bool) -> bool:
        """Return True if rank 0 is done (all-reduce MAX). On rank 0, an earlier signal raises Preempted."""
        number, all_done = self._exchange(is_done)
        self._last_beat = time.monotonic()
        if self.context.rank == 0 and number and not all_done:
            what = f"received {signal.Signals(number).name}"
            why = "no step was done: the data was being read. Files that are tokenised and packed stay cached"
            raise Preempted(what, why, "start the same command again", code="preempted")
        return bool(all_done)


def leave_preempted(save: str | None, stop: Preempted) -> None:
    """Write the marker of a run that ends before it knows its position. Call it on rank 0 only."""
    if save:
        try:
            latest = named_by_pointer(Path(save))
            position = position_of(read_state(latest)) if latest else TrainingPosition()
        except CheckpointError:  # the next start will report it
            position = TrainingPosition()
        remove_markers(Path(save))
        write_marker(Path(save), PREEMPTED, position, stop.what)
