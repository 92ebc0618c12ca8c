"""Lines that say how much of a long preparation of data is done, for rank 0's terminal."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mkd.config.data_files import COMPRESSED, TABLE_SUFFIXES
from mkd.data.files.opened import text_bytes
from mkd.data.files.tables import open_table
from mkd.data.records.rows import Row
from mkd.errors import DataError

LOG = logging.getLogger("mkd")
SILENT_S = 3.0  # a shorter task logs nothing
REPORT_S = 10.0  # between two lines


class Position:
    """The place that reading has reached in a sequence of files."""

    def __init__(self) -> None:
        self.megabytes = 0.0

    def follow(self, rows: Iterable[tuple[int, Row]], path: str) -> Iterator[tuple[int, Row]]:
        """Yield the rows of the next file. The rows of a table count as equally long."""
        first = self.megabytes
        end = first + total_megabytes([path])
        is_table, is_estimate = (Path(path).suffix in suffixes for suffixes in (TABLE_SUFFIXES, COMPRESSED))
        of_row = (end - first) / max(_num_rows(path), 1) if is_table else 0.0
        for number, row in rows:
            if is_table:
                self.megabytes = first + number * of_row
            else:
                text = row["text"] if isinstance(row, dict) else row
                self.megabytes += (len(text) + 1) / 1e6 if isinstance(text, bytes) else 0.0
            if is_estimate:
                self.megabytes = min(self.megabytes, end)
            yield number, row
        if is_estimate:
            self.megabytes = end


def _num_rows(path: str) -> int:
    """Return the rows of a table; 0 if it cannot be read, which its reader reports."""
    try:
        with open_table(Path(path)) as table:
            return table.num_rows
    except (DataError, OSError):
        return 0


def total_megabytes(paths: Sequence[str]) -> float:
    """Return the size of the text of files that exist, in millions of bytes; see `text_bytes`."""
    return text_bytes(paths) / 1e6


class ProgressLines:
    """Logs a line after some seconds, then every ten, and a last one at the end of a task that had one."""

    def __init__(self, name: str, total: float, unit: str, each: str = ""):
        """Begin a task of `total` units. `each` is the plural of the items whose rate is logged."""
        self._name, self._total, self._unit, self._each = name, total, unit, each
        self._start = time.monotonic()
        self._due, self._done, self._items = self._start + SILENT_S, 0.0, 0
        self._has_line = False

    def step(self, units: float = 1, items: int = 0) -> None:
        """Count units and items that are done."""
        self.at(self._done + units, items)

    def at(self, done: float, items: int = 0) -> None:
        """Record that `done` units and `items` more items are done by now. Log a line if one is due."""
        self._done, self._items = max(self._done, done), self._items + items
        if (now := time.monotonic()) < self._due:
            return
        self._due, self._has_line = now + REPORT_S, True
        seconds, share = now - self._start, min(self._done / self._total, 1.0) if self._total else 0.0
        parts = [f"{self._done:,.0f} of {self._total:,.0f} {self._unit}"]
        if self._each:
            parts.append(f"{self._items / seconds:,.0f} {self._each}/s")
        if share:
            parts.append(f"{_spoken(seconds / share - seconds)} left")
        LOG.info(f"{self._name}: {', '.join(parts)}")

    def end(self) -> None:
        """Log how long the task took, unless it was short."""
        if self._has_line:
            items = f"{self._items:,} {self._each} " if self._each else ""
            LOG.info(f"{self._name}: {items}done in {_spoken(time.monotonic() - self._start)}")


def _spoken(seconds: float) -> str:
    """Return a duration in the unit that a person would use."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
