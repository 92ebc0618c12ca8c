"""Which rank failed first, and what of. In a parallel run one failure makes many: the peers' connections break.

Every rank that fails by itself writes `LOG/errors/rank_N.txt`. A rank whose communication breaks looks there for the cause,
and says it in one line, so that the one traceback that matters is not buried under those of its victims.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from mkd.errors import ErrorList, MkdError
from mkd.operations.meeting import Meeting, Problem

PATIENCE_S = 60.0  # of a rank that cannot start, for the others to say what keeps them
WAIT_S = 2.0  # for the report of a peer that has failed first
POLL_S = 0.1
GLOO_WORDS = (
    "gloo",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL",
)  # in RuntimeErrors


@dataclass(frozen=True)
class Failure:
    """The first line of a report."""

    rank: int
    time: float  # s since the epoch
    exit_code: int
    what: str  # one line
    run: str  # which the ranks have agreed on, '' before that

    def describe(self) -> str:
        return f"stopped because rank {self.rank} failed: {self.what}"


@dataclass
class FailureReports:
    """The reports of one run's ranks, in a folder that all of them see. It may hold reports of other runs too."""

    rank: int
    world_size: int
    folder: Path | None = None  # until it is known
    run: str = ""  # until the ranks have agreed on it

    @property
    def has_peers(self) -> bool:
        return self.folder is not None and self.world_size > 1

    def path(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.txt"

    def write(self, what: str, details: str, exit_code: int = 1) -> None:
        """Report that this rank has failed; `what` is one line. Whoever sees the file sees all of it."""
        failure = Failure(self.rank, time.time(), exit_code, what, self.run)
        draft = self.folder / f".rank_{self.rank}.new"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(asdict(failure)) + "\n" + details, encoding="utf-8")
            os.replace(draft, self.path(self.rank))
        except OSError as error:  # the disk may be what has failed
            print(
                f"rank {self.rank}: cannot write {self.path(self.rank)}: {error}", file=sys.stderr, flush=True
            )

    def of_peers(self) -> list[Failure]:
        """What other ranks have reported, the first failure first. Nothing before all have joined."""
        if not self.run:
            return []
        try:
            names = os.listdir(self.folder)  # one look, and no file is opened while all is well
        except OSError:
            return []
        found = [
            self._read(rank)
            for rank in range(self.world_size)
            if rank != self.rank and self.path(rank).name in names
        ]
        return sorted((one for one in found if one and one.run == self.run), key=lambda one: one.time)

    def wait_for_peer(self) -> Failure | None:
        """The first failure of another rank, if one is reported within `WAIT_S`."""
        deadline = time.monotonic() + WAIT_S
        while not (failures := self.of_peers()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return failures[0] if failures else None

    def _read(self, rank: int) -> Failure | None:
        try:
            with self.path(rank).open(encoding="utf-8") as file:
                return Failure(**json.loads(file.readline()))
        except (OSError, ValueError, TypeError):  # not there
            return None


def end_of_rank(error: Exception, reports: FailureReports, meeting: Meeting) -> int:
    """Tell the user, and the other ranks, why this rank ends; returns its exit code."""
    if not meeting.is_over:
        return _end_before_meeting(error, meeting)
    rank = reports.rank
    if isinstance(error, MkdError) and error.on_all_ranks:
        if rank == 0:
            _say(error.report())
        return error.exit_code
    if reports.has_peers and is_communication_error(error):
        first = reports.wait_for_peer()
        if first:
            _say(f"rank {rank}: {first.describe()}\n  see {reports.path(first.rank)}")
            return first.exit_code
    exit_code, details = exit_code_of(error), traceback_of(error)
    if reports.has_peers:
        reports.write(one_line(error), details, exit_code)
        _tell_torchrun(error)
    _say(_own_words(error, details, rank))
    return exit_code


def _end_before_meeting(error: Exception, meeting: Meeting) -> int:
    """Flags, data or a disk: what several ranks have met alike, as they mostly do, only the first of them says."""
    details, rank = traceback_of(error), meeting.rank
    own = Problem(
        exit_code_of(error), one_line(error), str(error) if isinstance(error, MkdError) else details
    )
    if rank == 0:
        _say(_own_words(error, details, rank))
    try:
        problems = meeting.hold(own, PATIENCE_S)
    except Exception:  # whatever keeps the ranks apart matters less than what this one has to say
        problems = {rank: own}
    if rank and own.text not in [problem.text for other, problem in problems.items() if other < rank]:
        _say(_own_words(error, details, rank))
    return problems[min(problems)].exit_code


def _tell_torchrun(error: Exception) -> None:
    """It shows what its file holds as the root cause."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        get_error_handler().record_exception(error)


def is_communication_error(error: BaseException) -> bool:
    """Whether this, or what it was explicitly raised from, says that another rank cannot be reached."""
    import torch.distributed as dist

    if isinstance(error, dist.DistError):
        return True
    if isinstance(error, RuntimeError) and any(word in str(error) for word in GLOO_WORDS):
        return True
    return error.__cause__ is not None and is_communication_error(error.__cause__)


def exit_code_of(error: BaseException) -> int:
    return error.exit_code if isinstance(error, MkdError) else 1


def one_line(error: BaseException) -> str:
    if isinstance(error, ErrorList) and len(error.errors) > 1:
        return f"{one_line(error.errors[0])}, and {len(error.errors) - 1} more"
    first = (str(error).strip() or "no message").splitlines()[0]
    return first if isinstance(error, MkdError) else f"{type(error).__name__}: {first}"


def traceback_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _own_words(error: Exception, details: str, rank: int) -> str:
    """A user's error needs no traceback; one of ours does."""
    if isinstance(error, MkdError):
        return error.report() if rank == 0 else f"rank {rank}: {error.report()}"
    if is_communication_error(error):
        return f"{details}rank {rank}: lost contact with the other ranks, and none has said why: one was killed or hangs"
    return f"{details}rank {rank} failed first: {one_line(error)}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
