"""Records of agents as a source of completions."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from mkd.errors import DataError, MkdError
from mkd.kinds.sampled.records.record_inbox import RecordInbox
from mkd.kinds.sampled.sampler.rollouts import Request, Rollout, Sampling
from mkd.parallel.agreement import on_rank_0
from mkd.parallel.context import ParallelContext

T = TypeVar("T")
KEPT_WEIGHTS = 2  # the newest, and those that the writer may be reading


@dataclass
class RecordSource:
    """Takes the records of each step. Rank 0 reads them; the others wait for the outcome.

    Step N trains the weights after N - 1 updates. They are exported before it waits, unless the run has taken
    its records before it was cut off.
    """

    context: ParallelContext
    sampling: Sampling
    parameters_gathered: Callable[[], AbstractContextManager[None]]  # all weights are here inside of it
    export: Callable[[Path], None]  # writes the student as a Hugging Face folder; collective
    weights: Path  # folder for exports, on a file system that the writer sees
    inbox: RecordInbox | None  # on rank 0
    figures: dict[str, float] = field(default_factory=dict)  # metrics of the last step

    def start(self) -> None:
        """Remember what earlier steps took, of a run that resumes. Collective."""
        self._shared(lambda inbox: inbox.start())

    def sample(
        self,
        requests: Sequence[Request],
        iteration: int,
        progress: Callable[[int], None],
        following: Sequence[Request] = (),
    ) -> list[Rollout]:
        """Return the records of a step, equal on all ranks. Collective.

        Raises ServerLost if none come for too long and DataError for too many bad ones, on every rank.
        """
        rollouts = self._shared(lambda inbox: inbox.replay(iteration))
        if rollouts is None:
            self._publish(iteration - 1)
            while rollouts is None:
                found = self._shared(lambda inbox: inbox.poll(iteration))
                assert found is not None
                ready, rollouts = found
                progress(ready)
        self.figures = self._shared(lambda inbox: inbox.queue.counted()) or {}
        return list(rollouts)

    def _publish(self, version: int) -> None:
        """Export the weights of now, which are those after `version` updates. Collective."""
        path = self.weights / f"step_{version:07d}"
        with self.parameters_gathered():
            self.export(path)
        self._shared(partial(_publish, version=version, path=path))

    def _shared(self, action: Callable[[RecordInbox], T]) -> T | None:
        """Return what `action` returns on rank 0, on all ranks, which raise its error too. Collective."""
        inbox = self.inbox
        found = on_rank_0(lambda: action(inbox) if inbox is not None else None, _unexpected)
        return self.context.broadcast_object(found)


def _publish(inbox: RecordInbox, version: int, path: Path) -> None:
    """Tell the writer of new weights. Remove all others but the newest, whatever their numbers.

    A run that starts again from an earlier step finds higher numbers than its own.
    """
    inbox.publish(version, path.resolve())
    others = [one for one in path.parent.glob("step_*") if one != path]
    for old in sorted(others, key=lambda one: one.stat().st_mtime)[: 1 - KEPT_WEIGHTS]:
        shutil.rmtree(old, ignore_errors=True)


def _unexpected(error: Exception) -> MkdError:
    what = f"records cannot be read: {type(error).__name__}: {error}"
    do = "check the folder of --rollout-records and its permissions"
    return DataError(what, "", do, code="data-file-unreadable")
