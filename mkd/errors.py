"""The one family of errors that users see, and the exit codes that scripts rely on.

Every error says what is wrong, why that matters, and what to do. Invariants of our own code use `assert`;
anything a user can cause raises one of these, before expensive work.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

EXIT_DONE = 0
EXIT_USAGE = 64
EXIT_DATA = 65
EXIT_CHECKPOINT = 66
EXIT_NON_FINITE = 70
EXIT_PREEMPTED = 75
EXIT_CRASH_LOOP = 76


class MkdError(Exception):
    """Base class. `exit_code` is what the process returns when the error reaches the entry point."""

    exit_code = 1
    on_all_ranks = False  # known to be raised everywhere, so that rank 0 speaks for all

    def __init__(self, what: str, why: str = "", do: str = ""):
        self.what, self.why, self.do = what, why, do
        super().__init__(what, why, do)

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.do:
            lines.append(f"  do:  {self.do}")
        return "\n".join(lines)


class UsageError(MkdError):
    """A flag, a configuration file, or a combination of them, that cannot work."""

    exit_code = EXIT_USAGE


class DataError(MkdError):
    """Training or evaluation data that is missing, malformed or empty."""

    exit_code = EXIT_DATA


class CheckpointError(MkdError):
    """A checkpoint or a Hugging Face model folder that is missing, damaged or does not fit."""

    exit_code = EXIT_CHECKPOINT


class NonFiniteError(MkdError):
    """A loss or a gradient that is NaN or infinite; raised before the update."""

    exit_code = EXIT_NON_FINITE
    on_all_ranks = True


class Preempted(MkdError):
    """The run was told to end early; started again, it goes on from where it has saved."""

    exit_code = EXIT_PREEMPTED
    on_all_ranks = True


class CrashLoop(MkdError):
    """A run that was started again after a crash, and crashed in the same step each time."""

    exit_code = EXIT_CRASH_LOOP


class OutOfMemory(MkdError):
    """A GPU whose memory was not enough."""


class ErrorList(UsageError):
    """Several independent problems, reported at once. A list among `errors` counts as the problems in it.

    Problems of one kind have its exit code; of several, that of a configuration that cannot work.

    Lists come from flags, plans and headers, which are the same on all ranks.
    """

    on_all_ranks = True

    def __init__(self, errors: list[MkdError]):
        assert errors
        self.errors: list[MkdError] = [
            one for error in errors for one in (error.errors if isinstance(error, ErrorList) else [error])
        ]
        codes = {error.exit_code for error in self.errors}
        self.exit_code = codes.pop() if len(codes) == 1 else EXIT_USAGE
        Exception.__init__(self, errors)

    def __str__(self) -> str:
        if len(self.errors) == 1:
            return str(self.errors[0])
        numbered = [f"[{i}] {error}" for i, error in enumerate(self.errors, 1)]
        return f"{len(self.errors)} problems:\n" + "\n".join(numbered)


def returns_exit_code(main: Callable[..., int | None]) -> Callable[..., int]:
    """Decorator of a tool's `main`: an `MkdError` is printed on stderr and becomes its exit code; None becomes 0.

    Under torchrun, which sets LOCAL_RANK, rank 0 speaks for errors that all ranks have; any other one is printed by the rank
    that has it.
    """

    @wraps(main)
    def run(*args: Any, **kwargs: Any) -> int:
        try:
            return main(*args, **kwargs) or EXIT_DONE
        except MkdError as error:
            rank = int(os.environ.get("RANK", "0")) if "LOCAL_RANK" in os.environ else 0
            if rank == 0 or not error.on_all_ranks:
                print(
                    f"rank {rank}: error: {error}" if rank else f"error: {error}", file=sys.stderr, flush=True
                )
            return error.exit_code

    return run
