"""Keep what happens to a run in LOG/events.jsonl: starts, saves, skipped steps, spikes, warnings, the end.

A line is a JSON object: `time` (s since the epoch), `iteration`, `kind` (one of the constants below) and
`text`. A resumed run appends to the file, so that it also tells of the starts before.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import IO, Any

from mkd.errors import MkdError, Preempted
from mkd.log.writers import set_aside
from mkd.operations.console import LOG
from mkd.operations.phases import Follower

EVENTS_FILE = "events.jsonl"
START, RESUME, SAVE, SKIP, SPIKE = "start", "resume", "save", "skipped step", "loss spike"
WARNING, NOTE, DONE, STOP, FAILURE = "warning", "note", "done", "stopped", "failed"


class EventLog(Follower, logging.Handler):
    """Writes the lines of the logger "mkd" as events. `extra={"event": KIND}` of a log call names the kind.

    Lines from before `open` are kept until then, because the folder may belong to another run.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._started = time.time()
        self._iteration = 0
        self._early: list[dict[str, Any]] = []
        self._file: IO[str] | None = None
        LOG.addHandler(self)

    def open(self, folder: Path, iteration: int, appends: bool) -> None:
        """Write to `folder` from now on, after a start at `iteration`.

        Without `appends`, the events of an earlier run in the folder are renamed.
        """
        path = folder / EVENTS_FILE
        if not appends:
            set_aside(path)
        self._iteration = iteration
        torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")  # by a crash during a write
        self._file = path.open("a", encoding="utf-8")
        self._file.write("\n" * torn)
        begin = (RESUME, f"resumed from iteration {iteration}") if iteration else (START, "started")
        self._write({**_event(iteration, *begin), "time": self._started})
        for event in self._early:
            self._write({**event, "iteration": iteration})

    def entered(self, phase: str, iteration: int) -> None:
        """Remember the iteration of the events that follow."""
        self._iteration = iteration

    def emit(self, record: logging.LogRecord) -> None:
        default = WARNING if record.levelno >= logging.WARNING else NOTE
        event = _event(self._iteration, getattr(record, "event", default), record.getMessage())
        try:
            self._early.append(event) if self._file is None else self._write(event)
        except OSError:
            self.handleError(record)

    def add(self, kind: str, text: str) -> None:
        """Write an event that the terminal does not show."""
        self._write(_event(self._iteration, kind, text))

    def end(self, error: BaseException | None) -> None:
        """Write how the run ended, as a `Cleanup` action, and stop listening."""
        LOG.removeHandler(self)
        if self._file is None:
            return
        is_stop = isinstance(error, (Preempted, KeyboardInterrupt))
        kind = DONE if error is None else STOP if is_stop else FAILURE
        what = error.what if isinstance(error, MkdError) and hasattr(error, "what") else repr(error)
        try:
            with self._file:
                self._write(_event(self._iteration, kind, "ended" if error is None else what))
        except OSError as full:  # the run itself has ended as it should
            print(f"{EVENTS_FILE} lacks the end of the run: {full}", file=sys.stderr, flush=True)

    def _write(self, event: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()


def _event(iteration: int, kind: str, text: str) -> dict[str, Any]:
    return {"time": time.time(), "iteration": iteration, "kind": kind, "text": text}
