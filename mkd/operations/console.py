"""Print the messages of the logger "mkd" as plain lines on the stdout of rank 0."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mkd.errors import discard_closed_stdout

LOG = logging.getLogger("mkd")


class ConsoleHandler(logging.Handler):
    """Writes each line to `sys.stdout` as it is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stdout, flush=True)
        except BrokenPipeError:
            if not discard_closed_stdout():
                self.handleError(record)
        except Exception:
            self.handleError(record)


@contextmanager
def console(rank: int, indent: str = "") -> Iterator[None]:
    """Print the lines of "mkd" inside the block, on rank 0 only.

    All ranks log the same lines, and one copy is enough. `indent` precedes each line. Handlers of the root
    logger, which libraries install, do not see the lines.
    """
    handler = ConsoleHandler() if rank == 0 else logging.NullHandler()
    handler.setFormatter(logging.Formatter(f"{indent}%(message)s"))
    earlier = LOG.level, LOG.propagate
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.level, LOG.propagate = earlier
