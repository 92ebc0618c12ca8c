"""Ends a rank that makes no progress, or whose peers are gone, also when its main thread hangs in a collective."""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from mkd.config.schema import ParallelConfig
from mkd.operations.failures import Failure, FailureReports
from mkd.platform.processes import is_alive, process_space

T = TypeVar("T")

POLL_S = 0.1  # between looks at the clock
LOOK_S = 0.5  # between looks for what has become of the peers
PEERS_S = 1.5  # for the stack dumps of the others, once one rank has found no progress
MARGIN_S = 15.0  # that the process group waits longer than the watchdog
GRACE_S = 4.0  # for the main thread to meet a peer's failure by itself, before the process is ended
NO_PROGRESS = "no progress"
UNWATCHED = "task evaluation"  # its batches are not counted: the process group's own timeout has to do


@dataclass
class Watchdog:
    """Told which phase the run is in. A phase that lasts longer than its limit is a hang.

    Started, a thread of its own looks every `POLL_S`. It writes the stacks of a rank that hangs to its report and to stderr,
    and ends the process with exit code 1; the other ranks see the report, and do the same.
    """

    reports: FailureReports
    start_limit_s: float  # until the first step is done, and of saves ...
    step_limit_s: float  # ... and of every phase after that
    phase: str = "init"
    iteration: int = 0
    _since: float = field(default_factory=time.monotonic)
    _is_first_step: bool = True
    _thread: threading.Thread | None = None
    _done: threading.Event = field(default_factory=threading.Event)
    _peers: dict[int, int] = field(default_factory=dict)  # process id of every other rank in this container

    @classmethod
    def of(cls, parallel: ParallelConfig, reports: FailureReports) -> Watchdog:
        """With the limits of the configuration; not started."""
        start_s = 60 * parallel.distributed_timeout_minutes
        return cls(reports, start_s, parallel.distributed_timeout_seconds_after_init or start_s)

    @classmethod
    def idle(cls, rank: int, world_size: int) -> Watchdog:
        """One that is never started."""
        return cls(FailureReports(rank, world_size), math.inf, math.inf)

    def start(self) -> None:
        self._since = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Nothing is watched any more: ranks now end at their own pace."""
        self._done.set()

    def meet_peers(self) -> None:
        """Learn the process ids of the ranks on this machine, to notice when one is killed. Collective."""
        places: list[tuple[str, int, str] | None] = [None] * self.reports.world_size
        dist.all_gather_object(places, (process_space(), os.getpid(), uuid.uuid4().hex))
        self.reports.run = places[0][2]
        own = places[self.reports.rank]
        others = {
            rank: place[1] for rank, place in enumerate(places) if place[0] == own[0] and place[1] != own[1]
        }
        self._peers = others if Path("/proc/self/stat").exists() else {}

    def enter(self, phase: str, iteration: int) -> None:
        """The run is now in `phase` of step `iteration`; its time starts anew."""
        if self.phase == "optimizer" and phase != "optimizer":
            self._is_first_step = False
        self.phase, self.iteration, self._since = phase, iteration, time.monotonic()

    def each(self, phase: str, iteration: int, steps: Iterable[T]) -> Iterator[T]:
        """The same steps; each of them is progress."""
        for step in steps:
            self.enter(phase, iteration)
            yield step

    def limit_s(self) -> float:
        """Of the phase. Alone, a process may prepare its data for as long as it takes: nobody waits for it."""
        if self.phase == UNWATCHED or (self.phase == "init" and self.reports.world_size == 1):
            return math.inf
        if self.phase in ("init", "save") or self._is_first_step:
            return max(self.start_limit_s, self.step_limit_s)
        return self.step_limit_s

    def _watch(self) -> None:
        looked_at, peer_failed_at = time.monotonic(), None
        while not self._done.wait(POLL_S):
            now, limit = time.monotonic(), self.limit_s()
            if now - self._since > limit:
                self._end_hang(f"{NO_PROGRESS} in {self._place()} for {limit:g} s")
            if now - looked_at < LOOK_S:
                continue
            looked_at, failures = now, self.reports.of_peers()
            if any(one.what.startswith(NO_PROGRESS) for one in failures):
                self._end_hang(f"in {self._place()} for {now - self._since:.0f} s")
            if failures or self._missing_peers():
                peer_failed_at = peer_failed_at or now
                if now - peer_failed_at > GRACE_S:
                    self._end_after(failures)

    def _place(self) -> str:
        return f"{self.phase} of iteration {self.iteration}" if self.iteration else self.phase

    def _end_hang(self, what: str) -> None:
        """Dump this rank's stacks, give the others time for theirs, say who is where, end the process."""
        path = self.reports.path(self.reports.rank)
        self.reports.write(what, "", exit_code=1)
        with path.open("a", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        deadline = time.monotonic() + PEERS_S
        while len(self.reports.of_peers()) < self.reports.world_size - 1 and time.monotonic() < deadline:
            time.sleep(POLL_S / 5)
        others = {one.rank: one.what for one in self.reports.of_peers()} | {self.reports.rank: what}
        lines = [f"rank {self.reports.rank}: {what}", path.read_text(encoding="utf-8").partition("\n")[2]]
        lines += [
            f"  rank {rank}: {others.get(rank, 'no answer: stopped, killed, or its machine is gone')}"
            for rank in range(self.reports.world_size)
        ]
        lines.append(f"  the stacks of all ranks that answered are in {self.reports.folder}")
        lines.append(
            "  do:  look at a rank in another phase, or without an answer; if it was only slow, raise "
            "--distributed-timeout-minutes or --distributed-timeout-seconds-after-init"
        )
        _end("\n".join(lines), 1)

    def _end_after(self, failures: list[Failure]) -> None:
        rank = self.reports.rank
        if failures:
            _end(
                f"rank {rank}: {failures[0].describe()}\n  see {self.reports.path(failures[0].rank)}",
                failures[0].exit_code,
            )
        missing = ", ".join(map(str, self._missing_peers()))
        what = f"rank {missing} has ended without a word: it was killed, or the host ran out of memory"
        self.reports.write(what, "")
        _end(f"rank {rank}: {what}\n  do:  look into the system's log (dmesg) and the scheduler's", 1)

    def _missing_peers(self) -> list[int]:
        return [rank for rank, process in self._peers.items() if not is_alive(process)]


def _end(text: str, exit_code: int) -> None:
    """The main thread may never come back: no clean-up."""
    print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(exit_code)
