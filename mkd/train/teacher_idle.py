"""Share of a step in which teachers on processes of their own have nothing to do, for the student's log.

A teacher's process adds up the time of its forwards, on a GPU between events that it never waits for, and
posts it with its signs of life. The student multiplies the time of a row by the rows of its training steps,
so that evaluations and saves do not count, nor how old the latest post is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mkd.parallel.context import ParallelContext
from mkd.train.remote_states import RemoteStates

ROWS, BUSY_MS = "rows", "busy_ms"
"""Figures of a teacher's process: its forwards so far, and their time."""


@dataclass
class TeacherIdle:
    """Share of the steps' time in which teachers' processes have nothing to do, for rank 0 of the student."""

    said: Callable[[], Mapping[int, Mapping[str, Any]]]  # the latest figures of each process
    replicas: Sequence[Sequence[Sequence[int]]]  # of each teacher: the processes of each replica
    _earlier: dict[int, tuple[float, float]] = field(default_factory=dict)
    _row_ms: dict[int, float] = field(default_factory=dict)

    def share(self, rows: Sequence[float], step_ms: float) -> float | None:
        """Return the share of `step_ms` without work; None until all teachers have said how long a row takes.

        `rows`: those of each teacher in that time. A replica is as busy as its busiest stage.
        """
        self._read()
        idle, processes = 0.0, 0
        for number, replicas in zip(rows, self.replicas, strict=True):
            for ranks in replicas:
                if not all(rank in self._row_ms for rank in ranks):
                    return None
                busy = number / len(replicas) * max(self._row_ms[rank] for rank in ranks) / step_ms
                idle += len(ranks) * max(0.0, 1 - busy)
                processes += len(ranks)
        return idle / processes

    def _read(self) -> None:
        for rank, one in self.said().items():
            rows, busy_ms = one.get(ROWS, 0), one.get(BUSY_MS, 0.0)
            rows_before, busy_before = self._earlier.get(rank, (0, 0.0))
            if rows > rows_before:
                self._earlier[rank] = rows, busy_ms
                self._row_ms[rank] = (busy_ms - busy_before) / (rows - rows_before)


def take_rows(teachers: Sequence[RemoteStates], context: ParallelContext) -> list[float]:
    """Return how many rows all replicas of the student have taken from each teacher since the last call.

    Only rows of training count. Communication: one all-reduce SUM over all processes of the student.
    """
    taken = torch.tensor([one.take_rows() for one in teachers], dtype=torch.float64, device=context.device)
    dist.all_reduce(taken)
    return taken.tolist()
