"""Send metrics to trackio: to TRACKIO_SPACE_ID or TRACKIO_SERVER_URL, else to files on this machine."""

from __future__ import annotations

import contextlib
import io
import uuid
from typing import Any

from mkd.log.loggers.logger import Logger, LoggerStart, Record, numbers_of, stored_name

RUN_NAME = "trackio_run_name.txt"  # in the log folder: a resumed run extends the same curves


class TrackioLogger(Logger):
    """Log every number of a record as `train/<key>` or `<split>/<key>` at its iteration.

    A run is known by its name, so `--name` gets an ending of its own.
    """

    package = "trackio"
    setting = "trackio_project"
    advice = "log in to the Hub, or unset TRACKIO_SPACE_ID and TRACKIO_SERVER_URL to keep metrics in files"

    def __init__(self, start: LoggerStart):
        """Start a trackio run, or extend the folder's."""
        from trackio import finish, init

        self._finish = finish  # not the run's own: that would leave it current, to be finished again at exit
        name = stored_name(start, RUN_NAME, f"{start.log.name}-{uuid.uuid4().hex[:4]}")
        settings = {path: _json_value(value) for path, value in start.settings.items()}
        with contextlib.redirect_stdout(io.StringIO()):  # a banner of ten lines
            self._run = init(start.log.trackio_project, name, config=settings, resume="allow", embed=False)

    def write(self, record: Record) -> None:
        self._run.log(numbers_of(record), step=record["iteration"])

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._finish()


def _json_value(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
