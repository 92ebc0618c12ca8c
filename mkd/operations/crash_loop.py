"""Refuse to start a run that has crashed in the same step three times.

This also holds when a scheduler restarts the run. `SAVE/RUNNING` exists while a run is under way and holds
the step it has reached. A run that finishes, is told to end, or is refused removes the file. A run that finds
the file at startup follows a crash.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from mkd.config.schema import Config
from mkd.errors import CheckpointError, CrashLoop
from mkd.operations.failures import exit_code_of
from mkd.operations.phases import DATA, Follower
from mkd.parallel.agreement import on_rank_0
from mkd.parallel.context import ParallelContext

RUNNING = "RUNNING"
MAX_CRASHES = 3  # crashes in the same step, one after another
WIDTH = 20  # characters of the first line, which every step overwrites


@dataclass
class CrashCounter(Follower):
    """Keeps the marker of one run, on rank 0. On other ranks and without --save it does nothing."""

    path: Path | None = None
    _file: int | None = None  # descriptor

    @classmethod
    def start(cls, save: Path, config: Config) -> CrashCounter:
        """Mark the run as under way. Raise CrashLoop if the last `MAX_CRASHES` runs crashed in the same step.

        A run with other settings restarts the count, because something has changed.
        """
        path, settings = save / RUNNING, hashlib.sha256(repr(config).encode()).hexdigest()
        crash = _last_crash(path)
        if crash and crash["settings"] != settings:
            crash = None
        if crash and crash["times"] >= MAX_CRASHES:
            step = crash["step"]
            where = f"step {step}" if step else "the start, before the first step,"
            raise CrashLoop(
                f"the last {crash['times']} runs in {save} all crashed in {where}",
                "another start would most likely crash in the same way and keep the machines busy",
                "look at the error of the last run, fix its cause, and start again; with the same "
                f"settings, first delete {path}",
                code="crash-loop",
            )
        step, times = (crash["step"], crash["times"]) if crash else (None, 0)
        before = json.dumps({"crashed_in": step, "times": times, "settings": settings}).encode()
        draft = path.with_name(RUNNING + ".new")
        draft.write_bytes(_first_line(0) + before + b"\n")
        os.replace(draft, path)
        return cls(path, os.open(path, os.O_WRONLY))

    def entered(self, phase: str, iteration: int) -> None:
        """Record the step that begins by fetching its data."""
        if phase == DATA:
            self.reached(iteration)

    def reached(self, step: int) -> None:
        """Record that `step` comes next. A killed process loses nothing, so nothing is flushed to disk."""
        if self._file is not None:
            os.pwrite(self._file, _first_line(step), 0)

    def end(self, error: BaseException | None = None) -> None:
        """Remove the marker unless the run crashes: an error without an exit code in mkd/errors.py."""
        if self._file is None:
            return
        os.close(self._file)
        self._file = None
        if not (isinstance(error, Exception) and exit_code_of(error) == 1):
            self.path.unlink(missing_ok=True)

    def forgive(self) -> None:
        """Remove the marker of a run that is told to end at once. May be called from another thread."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def count_crashes(config: Config, context: ParallelContext) -> CrashCounter:
    """Build the counter of a run that starts now. Collective; raises CrashLoop on all ranks."""
    if not config.checkpoint.save:
        return CrashCounter()
    save = Path(config.checkpoint.save)

    def not_writable(error: Exception) -> CheckpointError:
        what = f"cannot write to {save}: {error}"
        return CheckpointError(what, "", "choose another --save", code="save-not-writable")

    return on_rank_0(lambda: CrashCounter.start(save, config), not_writable) or CrashCounter()


def _last_crash(path: Path) -> dict | None:
    """Return {step, times in a row, settings} of the run that left `path`; None if that is unreadable."""
    try:
        step, before = path.read_text(encoding="utf-8").splitlines()
        step, before = int(step), json.loads(before)
        times = 1 + (before["times"] if before["crashed_in"] == step else 0)
        return {"step": step, "times": times, "settings": before["settings"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _first_line(step: int) -> bytes:
    return f"{step:<{WIDTH}}\n".encode()
