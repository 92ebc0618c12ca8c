"""Write metrics: metrics.jsonl, which a run needs, and the loggers beside it (`mkd.log.loggers`)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from mkd.errors import MkdError
from mkd.log.loggers.guarded import Guarded
from mkd.log.loggers.logger import Record


def set_aside(path: Path) -> Path | None:
    """Rename the records of an earlier run, if any, to the first free NAME.N.SUFFIX. Writers follow them."""
    if not path.exists() or not path.stat().st_size:
        return None
    names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
    kept = next(name for name in names if not name.exists())
    return path.rename(kept)


class JsonlWriter:
    """Append one JSON object a line. NaN and infinity, which JSON does not have, become null."""

    def __init__(self, path: str | Path):
        """Open `path`, created if missing. Remove an unfinished last line, left by a crash during a write."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        content = self.path.read_bytes()
        self._file.truncate(content.rfind(b"\n") + 1)

    def write(self, record: Record) -> None:
        """Store one record so that readers see it on return."""
        line = json.dumps({key: _json_value(value) for key, value in record.items()}, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def truncate_after(self, iteration: int) -> None:
        """Remove the records of later iterations: a run that resumes from `iteration` writes them again.

        A crash leaves either the old or the new file.
        """
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if _iteration(line) <= iteration]
        if len(kept) == len(lines):
            return
        replacement = self.path.with_name(self.path.name + ".new")
        with replacement.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        self._file.close()
        os.replace(replacement, self.path)
        self._file = self.path.open("ab")

    def close(self) -> None:
        self._file.close()


class MetricLogger:
    """Send each record to metrics.jsonl and to every logger. Ranks that do not report have neither."""

    def __init__(self, metrics: JsonlWriter | None = None, loggers: Sequence[Guarded] = ()):
        self.metrics = metrics
        self.loggers = tuple(loggers)

    def write(self, record: Record) -> None:
        """Write `record`. Raises MkdError if metrics.jsonl cannot be written; loggers that fail only warn."""
        if self.metrics is None:
            return
        try:
            self.metrics.write(record)
        except OSError as error:
            what = f"the metrics of iteration {record['iteration']} could not be written: {error}"
            why = "a run without its metrics cannot be judged"
            do = "free disk space, and start the run again"
            raise MkdError(what, why, do, code="metrics-not-written") from error
        for logger in self.loggers:
            logger.write(record)

    def truncate_after(self, iteration: int) -> None:
        """Drop the records of later iterations: a run that resumes from `iteration` writes them again."""
        if self.metrics is not None:
            self.metrics.truncate_after(iteration)
        for logger in self.loggers:
            logger.truncate_after(iteration)

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()
        for logger in self.loggers:
            logger.close()


def _json_value(value: int | float | str) -> int | float | str | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _iteration(line: bytes) -> float:
    """Return the iteration of a line; infinity, so that it is dropped, if the line is not a record."""
    try:
        return float(json.loads(line)["iteration"])
    except (ValueError, KeyError, TypeError):
        return math.inf
