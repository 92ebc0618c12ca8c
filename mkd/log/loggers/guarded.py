"""Keep a run alive when one of its loggers fails: one warning; the others still get every record."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from mkd.log.loggers.logger import Logger, Record

LOG = logging.getLogger("mkd")
PATIENCE_S = 30.0
"""Time at the end of a run to send what is left in the background."""
MOST_WAITING = 1000
"""Records that may wait in the background. More means that nothing gets through."""


class Guarded:
    """Call a logger until it fails for the first time; then warn once and leave it out."""

    def __init__(self, name: str, logger: Logger, in_background: bool = False):
        """`name` is the logger's name in the warning. `in_background`: a thread calls it."""
        self.name = name
        self._logger: Logger | None = logger
        self._sender = _Sender(logger) if in_background else None

    def write(self, record: Record) -> None:
        """Hand `record` to the logger, at once or in the background."""
        sender = self._sender
        self._call(lambda logger: sender.put(record) if sender else logger.write(record))

    def truncate_after(self, iteration: int) -> None:
        """See `Logger`. Called before the first record."""
        self._call(lambda logger: logger.truncate_after(iteration))

    def close(self) -> None:
        """Close the logger; wait up to `PATIENCE_S` for what its thread has still to send."""
        sender = self._sender
        self._call(lambda logger: sender.finish(PATIENCE_S) if sender else logger.close())
        self._logger = None

    def _call(self, call: Callable[[Logger], Any]) -> None:
        if self._logger is None:
            return
        try:
            call(self._logger)
        except Exception as error:  # the errors of these packages share no base class
            self._logger = None
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            LOG.warning(
                "%s failed and gets no more metrics of this run: %s. metrics.jsonl has all of them",
                self.name,
                reason,
            )


class _Sender:
    """A thread that writes records in order, then closes. The next call raises its first exception."""

    def __init__(self, logger: Logger):
        self._logger = logger
        self._waiting: queue.Queue[Record | None] = queue.Queue(MOST_WAITING)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="logger", daemon=True)
        self._thread.start()

    def put(self, record: Record | None) -> None:
        """Add a record; None ends the thread after the records before it."""
        self._raise()
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            raise TimeoutError(f"{MOST_WAITING} records wait to be sent") from None

    def finish(self, patience_s: float) -> None:
        """Wait until all is written and the logger closed. Raises TimeoutError after `patience_s` seconds."""
        self.put(None)
        self._thread.join(patience_s)
        self._raise()
        if self._thread.is_alive():
            raise TimeoutError(f"records could not be sent within {patience_s:.0f} s")

    def _run(self) -> None:
        try:
            while (record := self._waiting.get()) is not None:
                self._logger.write(record)
            self._logger.close()
        except Exception as error:
            self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
