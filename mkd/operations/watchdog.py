"""End a rank that makes no progress or whose peers are gone, even if its main thread hangs."""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mkd.config.schema import ParallelConfig
from mkd.operations.failures import WITHOUT_REPORT, Failure, FailureReports
from mkd.operations.heartbeat import Heartbeat
from mkd.operations.phases import (
    END,
    FORWARD_BACKWARD,
    INIT,
    OPTIMIZER,
    READING,
    SAVE,
    TASK_EVALUATION,
    WAITING,
    Follower,
)
from mkd.parallel.side_groups import Launch
from mkd.platform.processes import is_alive, process_space

POLL_S = 0.1  # between looks at the clock
LOOK_S = 0.5  # between looks at the peers
PEERS_S = 1.5  # for the stack dumps of the other ranks, after one rank has detected a hang
MARGIN_S = 15.0  # how much longer the process group waits than the watchdog
GRACE_S = 4.0  # for the main thread to notice a peer's failure by itself, before the process ends
NO_PROGRESS = "no progress"


@dataclass
class Watchdog(Follower):
    """Follows the phases of a run. A phase that exceeds its limit is a hang.

    Once started, a separate thread looks every `POLL_S`. It writes the stacks of a hanging rank to its report
    and to stderr and ends the process with exit code 1. The other ranks see the report and do the same.
    """

    reports: FailureReports
    start_limit_s: float  # for each phase of the first step, and for saves
    step_limit_s: float  # for every other phase
    heartbeat: Heartbeat | None = None  # of a launch with sides
    side_size: int = 0  # processes of this one's side, 0: of the run, which has one side
    phase: str = INIT
    iteration: int = 0
    _since: float = field(default_factory=time.monotonic)
    _is_first_step: bool = True
    _thread: threading.Thread | None = None
    _done: threading.Event = field(default_factory=threading.Event)
    # Rank -> process id, of the other ranks in this container.
    _peers: dict[int, int] = field(default_factory=dict)
    _signalled: float = math.inf  # when a signal was first seen

    @classmethod
    def from_config(cls, parallel: ParallelConfig, reports: FailureReports) -> Watchdog:
        """Build a watchdog with the limits of the configuration; it is not started."""
        start_s = 60 * parallel.distributed_timeout_minutes
        return cls(reports, start_s, parallel.distributed_timeout_seconds_after_init or start_s)

    @classmethod
    def idle(cls, rank: int, world_size: int) -> Watchdog:
        """Build a watchdog that is never started."""
        return cls(FailureReports(rank, world_size), math.inf, math.inf)

    def start(self) -> None:
        """Start the thread that watches."""
        self._since = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def listen(self, heartbeat: Heartbeat) -> None:
        """Watch the other sides from now on, and tell them how this process is."""
        heartbeat.phase = lambda: self.phase
        self.heartbeat = self.reports.shared = heartbeat.start()

    def stop(self) -> None:
        """Stop watching, so that the ranks may end at their own pace."""
        self._done.set()

    def meet_peers(self, launch: Launch | None = None) -> None:
        """Learn the process ids of the ranks on this machine, to notice if one is killed. Collective.

        `launch`: all processes, if those of the default group are one side of several.
        """
        own = process_space(), os.getpid(), uuid.uuid4().hex
        places: list[Any] = [None] * self.reports.world_size
        if launch is None:
            dist.all_gather_object(places, own)
        else:
            places = launch.gather("processes", own)
        self.reports.run = places[0][2]
        space, own, _ = places[self.reports.rank]
        if Path("/proc/self/stat").exists():
            here = ((rank, process) for rank, (where, process, _) in enumerate(places) if where == space)
            self._peers = {rank: process for rank, process in here if process != own}

    def entered(self, phase: str, iteration: int) -> None:
        """Restart the clock for `phase` of step `iteration`."""
        if phase == END and self.heartbeat is None:  # other sides are still needed
            self.stop()
        if self.phase != phase and self.phase in (INIT, READING) and self.heartbeat is not None:
            # Its limits depend on it.
            self.heartbeat.beat()
        is_row = self.phase == FORWARD_BACKWARD and phase == WAITING  # of a teacher, which has no optimizer
        if is_row or (self.phase == OPTIMIZER and phase != OPTIMIZER):
            self._is_first_step = False
        self.phase, self.iteration, self._since = phase, iteration, time.monotonic()

    def limit_s(self) -> float:
        """Return the limit of the current phase.

        A process without peers may take as long as it needs to prepare its data, because no rank waits for
        it: neither do those of teachers on processes of their own (`await_student`). The batches of held-out
        tasks are not announced; the process group's own timeout covers them. A teacher's process may wait for
        the student as long as it needs, but after a signal no longer than a save may take.
        """
        if self.phase in (TASK_EVALUATION, END) or (self.phase == INIT and self.reports.world_size == 1):
            return math.inf
        if self.phase == READING and (self.side_size or self.reports.world_size) == 1:
            return math.inf
        if self.phase == WAITING and not self._is_signalled:
            return math.inf
        if self.phase in (INIT, READING, SAVE, WAITING) or self._is_first_step:
            return max(self.start_limit_s, self.step_limit_s)
        return self.step_limit_s

    def _watch(self) -> None:
        looked_at, peer_failed_at = time.monotonic(), None
        while not self._done.wait(POLL_S):
            now, limit = time.monotonic(), self.limit_s()
            if self._is_signalled:
                self._signalled = min(now, self._signalled)
            since = max(self._since, self._signalled) if self.phase == WAITING else self._since
            if now - since > limit:
                self._end_hang(f"{NO_PROGRESS} in {self._place()} for {limit:g} s")
            if now - looked_at < LOOK_S:
                continue
            looked_at, peer_failed_at = now, self._look_at_peers(now, peer_failed_at)

    def _look_at_peers(self, now: float, failed_at: float | None) -> float | None:
        """End the process if others have ended, or give no sign of life. Return when they first had ended."""
        silence = self.heartbeat.silence() if self.heartbeat is not None else None
        failures = self.reports.of_peers()
        if any(one.what.startswith(NO_PROGRESS) for one in failures):
            self._end_hang(f"in {self._place()} for {now - self._since:.0f} s")
        missing = self._missing_peers()
        if missing and not failures and self.heartbeat is not None:  # all sides are to say the same
            failures = [self.reports.post(Failure(missing[0], time.time(), 1, WITHOUT_REPORT, ""))]
        if silence is not None:
            self._end_first(failures[0] if failures else silence)
        if not failures and not missing:
            return failed_at
        if failed_at is not None and now - failed_at > GRACE_S:
            self._end_after(failures)
        return now if failed_at is None else failed_at

    @property
    def _is_signalled(self) -> bool:
        signals = self.heartbeat.signals if self.heartbeat is not None else None
        return signals is not None and bool(signals.received)

    def _place(self) -> str:
        return f"{self.phase} of iteration {self.iteration}" if self.iteration else self.phase

    def _end_hang(self, what: str) -> None:
        """Dump this rank's stacks, wait for those of the others, print where each is, and end the process."""
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
            "  do:  look at a rank in another phase or without an answer; if it was only slow, raise "
            "--distributed-timeout-minutes or --distributed-timeout-seconds-after-init"
        )
        self._end("\n".join(lines), 1)

    def _end_after(self, failures: list[Failure]) -> None:
        """End the process because a peer failed, whether or not it has reported that."""
        rank = self.reports.rank
        if failures:
            self._end(self.reports.describe(failures[0]), failures[0].exit_code)
        missing = ", ".join(map(str, self._missing_peers()))
        what = f"rank {missing} has ended without a report: it was killed, or the host ran out of memory"
        self.reports.write(what, "")
        self._end(f"rank {rank}: {what}\n  do:  look into the system's log (dmesg) and the scheduler's", 1)

    def _end_first(self, failure: Failure) -> None:
        """End the process because of another one, which cannot say so itself."""
        first = replace(self.reports.post(failure), run=self.reports.run)
        self.reports.record(first)  # for ranks that the store has lost
        do = "look at that process and its machine, and into the logs of the system and the scheduler"
        self._end(f"{self.reports.describe(first)}\n  do:  {do}", first.exit_code)

    def _missing_peers(self) -> list[int]:
        """Return the ranks of this machine whose process is gone. With several sides, it may say goodbye."""
        missing = [rank for rank, process in self._peers.items() if not is_alive(process)]
        if self.heartbeat is None or self.heartbeat.lost:
            return missing
        self.heartbeat.missed = frozenset(missing)
        return [rank for rank in missing if rank in self.heartbeat.dead]

    def _end(self, text: str, exit_code: int) -> None:
        """End the process at once, without cleanup: the main thread may never return."""
        self.reports.say(text)
        sys.stdout.flush()
        self.reports.close()  # the others have read why
        os._exit(exit_code)
