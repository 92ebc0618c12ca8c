"""Tell which rank failed first, and why.

In a parallel run one failure causes many, because the connections of the peers break. Every rank that fails
by itself writes `LOG/errors/rank_N.txt`. A rank whose communication breaks reads the cause there and prints
it in one line. The one traceback that matters is then not buried under those of the other ranks.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from mkd.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, ErrorList, MkdError, Preempted
from mkd.operations.launch.rendezvous import Problem, Rendezvous
from mkd.torchrun_report import tell_torchrun

PATIENCE_S = 60.0  # how long a rank that cannot start waits for the problems of the others
WAIT_S = 2.0  # for the report of a peer that failed first
SIDES_WAIT_S = 6.0  # the same at a store: some process must first see that another one is gone
WITHOUT_REPORT = "it ended without a report: it was killed, or the host ran out of memory"
LOST_CONTACT = "lost contact with the other ranks, and none has said why: one was killed or hangs"
POLL_S = 0.1
GLOO_WORDS = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL")
"""Words in the RuntimeErrors of broken communication."""
NCCL_ALLOCATES = re.compile(r"Failed to CUDA [cm]alloc(?: async)? (\d+) bytes")
"""NCCL's words for GPU memory that it did not get. No peer is to blame for this."""


@dataclass(frozen=True)
class Failure:
    """The first line of a report."""

    rank: int
    time: float  # s since the epoch
    exit_code: int
    what: str  # one line
    run: str  # identifies the run; '' before its ranks have agreed on it

    def describe(self) -> str:
        verb = "was told to end" if self.exit_code == EXIT_PREEMPTED else "failed"
        return f"stopped because rank {self.rank} {verb}: {self.what}"


class FirstFailure(Protocol):
    """The first failure of a launch with several sides: see `mkd.operations.heartbeat`."""

    @property
    def first(self) -> Failure | None: ...

    def post(self, failure: Failure) -> Failure: ...

    def close(self) -> None: ...


@dataclass
class FailureReports:
    """The reports of one run's ranks, in a folder that all see and that may hold those of other runs."""

    rank: int
    world_size: int
    folder: Path | None = None  # None until it is known
    run: str = ""  # '' until the ranks have agreed on it
    speaker: int = 0  # rank that prints an error of all ranks: the first one of this side of the run
    has_sides: bool = False  # teachers have processes of their own, which do not raise the same errors
    has_spoken: bool = False  # this rank has said why it ends
    shared: FirstFailure | None = None  # of a launch with sides, which may have no folder in common

    @property
    def has_peers(self) -> bool:
        """True if other ranks can read this rank's report."""
        return self.folder is not None and self.world_size > 1

    def post(self, failure: Failure) -> Failure:
        """Tell the other sides why the launch ends. Return its first reason: this one, or an earlier one."""
        return failure if self.shared is None else self.shared.post(failure)

    def post_interrupt(self) -> None:
        """Tell the other sides that a second Ctrl-C ends this process at once."""
        self._post_end(EXIT_INTERRUPTED, "a second Ctrl-C has ended it")

    def post_stop(self, stop: Preempted) -> None:
        """Tell the other sides that this one ends early, which may be before they have met."""
        if self.rank == self.speaker:
            self._post_end(stop.exit_code, stop.what)

    def _post_end(self, exit_code: int, what: str) -> None:
        self.post(Failure(self.rank, time.time(), exit_code, what, self.run))

    def close(self) -> None:
        """Say goodbye to the other sides: this process ends, and has told why if there is a reason."""
        if self.shared is not None:
            self.shared.close()

    def path(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.txt"

    def write(self, what: str, details: str, exit_code: int = 1) -> None:
        """Report that this rank has failed. `what` is one line. The file appears atomically."""
        self.record(Failure(self.rank, time.time(), exit_code, what, self.run), details)

    def record(self, failure: Failure, details: str = "") -> None:
        """Write the failure into the report of this rank, which may end because of another one."""
        draft = self.folder / f".rank_{self.rank}.new"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(asdict(failure)) + "\n" + details, encoding="utf-8")
            os.replace(draft, self.path(self.rank))
        except OSError as error:  # the disk may be what has failed
            _print(f"rank {self.rank}: cannot write {self.path(self.rank)}: {error}")
        self.post(failure)

    def of_peers(self) -> list[Failure]:
        """Return the failures of other ranks, the first one first. Their files count once all have joined."""
        first = self.shared.first if self.shared is not None else None
        found = self._in_files()
        return found if first is None else [first, *(one for one in found if one.rank != first.rank)]

    def _in_files(self) -> list[Failure]:
        if not self.run:
            return []
        try:
            names = os.listdir(self.folder)  # one look; no file is opened while all is well
        except OSError:
            return []
        others = (rank for rank in range(self.world_size) if rank != self.rank)
        found = [self._read(rank) for rank in others if self.path(rank).name in names]
        return sorted((one for one in found if one and one.run == self.run), key=lambda one: one.time)

    def wait_for_peer(self) -> Failure | None:
        """Return the first failure of another rank, if one is reported soon."""
        deadline = time.monotonic() + (WAIT_S if self.shared is None else SIDES_WAIT_S)
        while not (failures := self.of_peers()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return failures[0] if failures else None

    def say(self, text: str) -> None:
        """Print why this rank ends, once: the main thread and the watchdog may both find out."""
        if not self.has_spoken:
            self.has_spoken = True
            _print(text)

    def describe(self, first: Failure) -> str:
        """Return the lines of a rank that ends because of the failure of another one."""
        text = f"rank {self.rank}: {first.describe()}"
        has_report = self.folder is not None and self.path(first.rank).exists()
        return f"{text}\n  see {self.path(first.rank)}" if has_report else text

    def _read(self, rank: int) -> Failure | None:
        try:
            with self.path(rank).open(encoding="utf-8") as file:
                return Failure(**json.loads(file.readline()))
        except (OSError, ValueError, TypeError):  # not there
            return None


def end_of_rank(error: Exception, reports: FailureReports, rendezvous: Rendezvous) -> int:
    """Tell the user, the other ranks and torchrun why this rank ends; return its exit code."""
    if not rendezvous.is_over:
        return _end_before_rendezvous(error, rendezvous)
    rank = reports.rank
    if isinstance(error, MkdError) and error.on_all_ranks:
        if rank == reports.speaker:
            if reports.has_sides and reports.has_peers:
                reports.write(one_line(error), traceback_of(error), error.exit_code)
            _report(error.report() if rank == 0 else f"rank {rank}: {error.report()}")
        return error.exit_code
    has_lost_peers = reports.has_peers and is_communication_error(error)
    if has_lost_peers:
        first = reports.wait_for_peer()
        if first:
            reports.say(reports.describe(first))
            return first.exit_code
    exit_code, details = exit_code_of(error), traceback_of(error)
    if reports.has_peers:
        has_cause = reports.shared is None or not has_lost_peers
        reports.write(one_line(error) if has_cause else LOST_CONTACT, details, exit_code)
    first = reports.shared.first if reports.shared is not None else None
    if first is not None and first.rank != rank:  # both failed at the same time, and it was a little earlier
        reports.say(f"{details}{reports.describe(first)}")
        return first.exit_code
    reports.has_spoken = True
    _report(_own_words(error, details, rank, has_lost_peers))
    return exit_code


def _end_before_rendezvous(error: Exception, rendezvous: Rendezvous) -> int:
    """Report a problem of flags, data or a disk. Of the ranks that share it, only the lowest prints it."""
    details, rank = traceback_of(error), rendezvous.rank
    has_lost_peers = rendezvous.world_size > 1 and is_communication_error(error)
    words = _own_words(error, details, rank, has_lost_peers)
    text = str(error) if isinstance(error, MkdError) else details
    own = Problem(exit_code_of(error), one_line(error), text)
    if rank == 0:
        _report(words)
    try:
        problems = rendezvous.exchange(own, PATIENCE_S)
    except Exception:  # the problem of this rank matters more than what keeps the ranks apart
        problems = {rank: own}
    if rank and own.text not in [problem.text for other, problem in problems.items() if other < rank]:
        _report(words)
    return problems[min(problems)].exit_code


def _report(text: str) -> None:
    """Print why this rank ends, and add it to torchrun's own report."""
    tell_torchrun(text)
    _print(text)


def is_communication_error(error: BaseException) -> bool:
    """Return True if this error, or one that it was raised from, says that a rank is out of reach."""
    import torch.distributed as dist

    if NCCL_ALLOCATES.search(str(error)):
        return False
    if isinstance(error, dist.DistError):
        return True
    if isinstance(error, RuntimeError) and any(word in str(error) for word in GLOO_WORDS):
        return True
    return error.__cause__ is not None and is_communication_error(error.__cause__)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ends with `error`: 1 for errors of other libraries."""
    return error.exit_code if isinstance(error, MkdError) else 1


def one_line(error: BaseException) -> str:
    """Return the first line of an error, preceded by its type unless it is an error of mkd."""
    if isinstance(error, ErrorList) and len(error.errors) > 1:
        return f"{one_line(error.errors[0])}, and {len(error.errors) - 1} more"
    first = (str(error).strip() or "no message").splitlines()[0]
    return first if isinstance(error, MkdError) else f"{type(error).__name__}: {first}"


def traceback_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _own_words(error: Exception, details: str, rank: int, has_lost_peers: bool) -> str:
    """Describe the error of this rank. The user's own errors have no traceback."""
    if isinstance(error, MkdError):
        return error.report() if rank == 0 else f"rank {rank}: {error.report()}"
    if has_lost_peers:
        return f"{details}rank {rank}: {LOST_CONTACT}"
    return f"{details}rank {rank} failed first: {one_line(error)}"


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
