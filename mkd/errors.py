"""The one family of errors that users see, and the exit codes that scripts rely on.

Every error has a code, which stands for the remedy, and says what is wrong, why that matters, and what to
do. Anything that a user can cause raises one of these, before expensive work; `assert` guards the invariants
of our own code. `mkd explain` lists the codes, which are in mkd/error_codes.
"""

from __future__ import annotations

import copy
import os
import select
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

from mkd.torchrun_report import rank_0_has_reported, tell_torchrun

EXIT_DONE = 0
EXIT_USAGE = 64
EXIT_DATA = 65
EXIT_CHECKPOINT = 66
EXIT_NON_FINITE = 70
EXIT_PREEMPTED = 75
EXIT_CRASH_LOOP = 76
EXIT_INTERRUPTED = 130  # as of a program that Ctrl-C ends
EXIT_CLOSED_PIPE = 141  # as of a program that SIGPIPE ends

MOST_SHOWN = 20
"""Problems of a list that are printed. More would push the first, often the cause, off the screen."""

E = TypeVar("E", bound="MkdError")
T = TypeVar("T")


class MkdError(Exception):
    """An error that has no exit code of its own."""

    exit_code = 1  # returned by the process when the error reaches the entry point
    on_all_ranks = False  # True: every rank raises it, so only rank 0 prints it

    def __init__(self, what: str, why: str = "", do: str = "", *, code: str):
        """`code` is one of mkd/error_codes/code_meanings.py.

        Two places share a code if the reader has to do the same.
        """
        super().__init__(what, why, do)
        self.what, self.why, self.do, self.code = what, why, do, code

    def __reduce__(self) -> tuple[Any, ...]:
        """Let errors travel to other processes and `copy.copy`, although `code` is required."""
        return _restore, (type(self), self.args, self.__dict__)

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.do:
            lines.append(f"  do:  {self.do}")
        return "\n".join(lines)

    def report(self) -> str:
        """Return the text for stderr: `error[CODE]: what`, then the lines `why:` and `do:`."""
        return f"error[{self.code}]: {self}"

    def located(self: E, place: str) -> E:
        """Return a copy that starts with the place of the problem: `place: what`."""
        located = copy.copy(self)
        located.what = f"{place}: {self.what}"
        return located


def _restore(cls: type[E], args: tuple[Any, ...], state: dict[str, Any]) -> E:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


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
    """The run was told to end early. Started again, it resumes from its last checkpoint."""

    exit_code = EXIT_PREEMPTED
    on_all_ranks = True

    @property
    def label(self) -> str:
        """Word before its text: Ctrl-C interrupts a run, everything else preempts it."""
        return "interrupted" if self.what == "received SIGINT" else "preempted"


class ServerLost(Preempted):
    """The rollout server cannot be reached any more: the run saves, and ends as if it had been preempted."""


class ServerAnswer(MkdError):
    """The rollout server answers, but not as a server of this model with these weights would."""


class CrashLoop(MkdError):
    """A run that was restarted after a crash, and crashed in the same step each time."""

    exit_code = EXIT_CRASH_LOOP


class OutOfMemory(MkdError):
    """A GPU that ran out of memory."""


class ErrorList(UsageError):
    """Several independent problems, reported at once.

    An ErrorList among `errors` counts as the problems in it. If all problems have one exit code, the list has
    it too; otherwise it has that of a UsageError. Lists come from flags, plans and headers, which are the
    same on all ranks.
    """

    on_all_ranks = True

    def __init__(self, errors: Sequence[MkdError]):
        assert errors
        self.errors: list[MkdError] = [
            one for error in errors for one in (error.errors if isinstance(error, ErrorList) else [error])
        ]
        exit_codes = {error.exit_code for error in self.errors}
        self.exit_code = exit_codes.pop() if len(exit_codes) == 1 else EXIT_USAGE
        self.code = self.errors[0].code if len(self.errors) == 1 else "several-problems"
        Exception.__init__(self, errors)

    @property
    def codes(self) -> list[str]:
        """The code of every problem, in order."""
        return [error.code for error in self.errors]

    def __str__(self) -> str:
        if len(self.errors) == 1:
            return str(self.errors[0])
        shown = _shown_problems(self.errors)
        numbered = [f"[{i + 1}] {self.errors[i].report()}" for i in shown]
        hidden = Counter(error.code for i, error in enumerate(self.errors) if i not in shown)
        more = ", ".join(f"{count} x {code}" for code, count in hidden.items())
        end = [f"and {hidden.total()} more: {more}"] if hidden else []
        return f"{len(self.errors)} problems:\n" + "\n".join([*numbered, *end])

    def report(self) -> str:
        """Return the text for stderr: the one problem's own, or `error: N problems:` and a numbered list."""
        return self.errors[0].report() if len(self.errors) == 1 else f"error: {self}"


def _shown_problems(errors: Sequence[MkdError]) -> list[int]:
    """Return the places of at most MOST_SHOWN problems, in order: the first of every code, then others."""
    firsts: dict[str, int] = {}
    for i, error in enumerate(errors):
        firsts.setdefault(error.code, i)
    others = sorted(set(range(len(errors))) - set(firsts.values()))
    return sorted([*firsts.values(), *others][:MOST_SHOWN])


def collect_error(problems: list[MkdError], compute: Callable[[], T]) -> T | None:
    """Return `compute()`. If it raises an MkdError, add that to `problems` and return None."""
    try:
        return compute()
    except MkdError as error:
        problems.append(error)
        return None


def raise_all(problems: Sequence[MkdError]) -> None:
    """Raise one problem as itself and several as an `ErrorList`."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ErrorList(problems)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def returns_exit_code(main: Callable[..., int | None]) -> Callable[..., int]:
    """Decorate a tool's `main`: print an `MkdError` on stderr and return its exit code; return 0 for None.

    Under torchrun, which sets LOCAL_RANK, rank 0 alone prints an error that all ranks have. The others wait
    for it, because a launcher ends all ranks with the first one. A rank prints its own error itself. If the
    reader of stdout leaves, as `| head` does, end without a word. What is printed to a stream that was closed
    before the start is discarded.
    """

    @wraps(main)
    def run(*args: Any, **kwargs: Any) -> int:
        _open_closed_streams()
        try:
            try:
                exit_code = main(*args, **kwargs) or EXIT_DONE
            except MkdError as error:
                exit_code = error.exit_code
                _print(error)
            except KeyboardInterrupt:
                exit_code = EXIT_INTERRUPTED
                if os.environ.get("RANK", "0") == "0":
                    print("interrupted", file=sys.stderr, flush=True)
            except SystemExit:  # argparse's, after a help text
                sys.stdout.flush()
                raise
            sys.stdout.flush()  # here, where a closed pipe is expected
            return exit_code
        except BrokenPipeError:
            if not discard_closed_stdout():
                raise
            return EXIT_CLOSED_PIPE

    return run


def _open_closed_streams() -> None:
    for name in ("stdin", "stdout", "stderr"):  # by their numbers: open() takes the lowest free one
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _print(error: MkdError) -> None:
    rank = int(os.environ.get("RANK", "0")) if "LOCAL_RANK" in os.environ else 0
    text = f"rank {rank}: {error.report()}" if rank else error.report()
    if rank == 0 or not error.on_all_ranks or not rank_0_has_reported():
        print(text, file=sys.stderr, flush=True)
    tell_torchrun(text)  # after the text is printed: the other ranks end when they see it


def discard_closed_stdout() -> bool:
    """If stdout is a pipe that nobody reads any more, discard what is printed from now on.

    Return True if so; a BrokenPipeError then came from there, and not from another process.
    """
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # reports errors alone
    if not poll.poll(0):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return True
