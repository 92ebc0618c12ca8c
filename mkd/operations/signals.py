"""Catch signals that ask the process to end, so that the run can end after its step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that end a run.

torchrun and schedulers end a job with SIGTERM. Slurm warns with the signal of --signal. People press Ctrl-C.
"""


@dataclass
class Signals:
    """The first signal that this process received, or 0. Slurm sends each twice: later ones are ignored."""

    received: int = 0


@contextmanager
def caught_signals(afterwards: signal.Handlers | None = None) -> Iterator[Signals]:
    """Catch `SIGNALS` inside the block instead of ending the process. A second Ctrl-C interrupts as usual.

    Afterwards the earlier handlers are restored. If `afterwards` is given, it replaces them without a gap.
    """
    signals = Signals()

    def catch(number, frame) -> None:
        if number == signal.SIGINT and signals.received == signal.SIGINT:
            signal.default_int_handler(number, frame)
        signals.received = signals.received or number

    if threading.current_thread() is not threading.main_thread():  # where Python delivers no signals
        yield signals
        return
    earlier = {number: signal.signal(number, catch) for number in SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler if afterwards is None else afterwards)


def ignore_signals() -> None:
    """Ignore `SIGNALS` from now on. Python's handlers would end with the interpreter."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
