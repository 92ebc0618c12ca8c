"""The checkpoints of a run, one after the other: written at once, or by a thread while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from mkd.checkpoint.agreement import on_rank_0
from mkd.checkpoint.distributed import TrainingState, start_save
from mkd.checkpoint.folders import Retention, TrainingPosition
from mkd.checkpoint.lock import WriterLock
from mkd.checkpoint.saving import Save
from mkd.errors import CheckpointError
from mkd.parallel.context import ParallelContext


@dataclass
class Saver:
    """All methods are collective. Errors are CheckpointErrors, raised on all ranks."""

    directory: Path
    context: ParallelContext
    hf_dir: Path | None
    fingerprints: Mapping[str, object]
    retention: Retention
    is_async: bool
    lock: WriterLock | None  # on rank 0
    note: Callable[[str], None]  # called with what has been saved
    pending: tuple[Save, threading.Thread] | None = field(default=None, init=False)

    def save(self, state: TrainingState, position: TrainingPosition, wait: bool) -> None:
        """Save `state` as it is now. Without `wait`, a run that saves asynchronously goes on while a thread writes."""
        self.finish()
        in_background = self.is_async and not wait
        started = start_save(
            self.directory,
            state,
            position,
            self.context,
            self.hf_dir,
            fingerprints=self.fingerprints,
            retention=self.retention,
            copied=in_background,
        )
        if in_background:
            thread = threading.Thread(target=started.write, name="checkpoint writer")
            thread.start()
            self.pending = started, thread
        else:
            self._done(started.write())

    def poll(self) -> None:
        """Finish the save in the background if all ranks have written. An all-reduce MIN, only while there is one."""
        if self.pending is None:
            return
        is_written = torch.tensor([not self.pending[1].is_alive()], dtype=torch.int32, device=self.context.device)
        dist.all_reduce(is_written, op=dist.ReduceOp.MIN)
        if is_written.item():
            self.finish()

    def finish(self) -> None:
        """Wait for the save in the background, if there is one."""
        if self.pending is None:
            return
        (started, thread), self.pending = self.pending, None
        thread.join()
        self._done(started)

    def close(self) -> None:
        """The run saves no more: another one may write to the folder. Local."""
        if self.lock is not None:
            self.lock.release()

    def _done(self, written: Save) -> None:
        self.note(f"saved checkpoint {written.finish()}")


def lock_folder(directory: Path, context: ParallelContext) -> WriterLock | None:
    """The lock of a save folder, on rank 0; makes the folder. Collective."""

    def take() -> WriterLock:
        directory.mkdir(parents=True, exist_ok=True)
        return WriterLock.take(directory)

    return on_rank_0(take, lambda error: CheckpointError(f"cannot write to {directory}: {error}", "", "choose another --save"))
