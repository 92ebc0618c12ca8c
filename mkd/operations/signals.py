"""Signals that ask the process to end: noted, so that the run can end after its step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""torchrun and schedulers end a job with SIGTERM, Slurm warns with what --signal names, people press Ctrl-C."""


@dataclass
class Signals:
    """The first signal that this process has received, 0: none. Later ones change nothing: Slurm sends each twice."""

    received: int = 0


@contextmanager
def caught_signals(afterwards: signal.Handlers | None = None) -> Iterator[Signals]:
    """Inside, `SIGNALS` are noted instead of ending the process; a second Ctrl-C interrupts as ever.

    Then they are handled as before or, without a gap, as `afterwards` says.
    """
    signals = Signals()

    def note(number, frame) -> None:
        if number == signal.SIGINT and signals.received == signal.SIGINT:
            signal.default_int_handler(number, frame)
        signals.received = signals.received or number

    if threading.current_thread() is not threading.main_thread():  # where Python delivers no signals
        yield signals
        return
    earlier = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler if afterwards is None else afterwards)


def ignore_signals() -> None:
    """From now on. Unlike a handler of Python's, this lasts until the process is gone, also while the interpreter ends."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
