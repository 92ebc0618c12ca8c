"""Catch signals that ask the process to end, so that the run can end after its step.

A thread acknowledges a signal at once, also while the main thread computes or waits for other ranks. A second
Ctrl-C ends the process within seconds.
"""

from __future__ import annotations

import _thread
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from mkd.errors import EXIT_INTERRUPTED
from mkd.parent_process import LAUNCHER

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that end a run.

torchrun and schedulers end a job with SIGTERM. Slurm warns with the signal of --signal. People press Ctrl-C.
A closed terminal's SIGHUP ends a run as well, unless `nohup` has let the process ignore it.
"""
COPY_S = 2.0  # within which torchrun passes on a Ctrl-C that its processes have also got from the terminal
FORCED_S = 3.0  # for the main thread to clean up after a second Ctrl-C, before the process ends
END = 0  # a byte that is not a signal


@dataclass
class Signals:
    """The first signal that this process received, or 0. Slurm sends each twice: later ones are ignored."""

    received: int = 0
    is_forced: bool = False  # a second Ctrl-C has asked to end now
    # What happens after the first signal, what a second Ctrl-C loses, and what stays then.
    notice: str = "stopping when the start is over; nothing has been trained yet"
    lost: str = ""
    kept: str = "this start has trained nothing"
    speaks: bool = field(default_factory=lambda: os.environ.get("RANK", "0") == "0")  # one rank is enough
    has_torchrun: bool = field(default_factory=lambda: _has_torchrun(os.environ))
    when_forced: list[Callable[[], None]] = field(default_factory=list)  # called in a thread
    _is_asked: bool = False  # a signal has been acknowledged
    _copy_until: float = 0.0  # on the monotonic clock: until then torchrun's copy is expected

    def came(self, number: int) -> bool:
        """Acknowledge a signal. Return True if it is a second Ctrl-C. Called in a thread."""
        now, is_ctrl_c = time.monotonic(), number == signal.SIGINT
        self.received = self.received or number
        if number == signal.SIGHUP:
            _leave_terminal()
        if not self._is_asked:
            self._is_asked, self._copy_until = True, now + COPY_S * self.has_torchrun
            again = f"; press Ctrl-C again to stop now{self.lost}"
            name = "" if is_ctrl_c else f"received {signal.Signals(number).name}: "
            self._say(f"{name}{self.notice}{again if is_ctrl_c else ''}")
            return False
        # At a second Ctrl-C torchrun sends SIGTERM to processes that the terminal does not reach.
        is_second = is_ctrl_c or (self.has_torchrun and self.received == signal.SIGINT)
        if not is_second or number == signal.SIGUSR1 or self.is_forced:
            return False
        if is_ctrl_c and now < self._copy_until:
            self._copy_until = 0.0
            return False
        self.is_forced = True
        self._say(f"stopping now; {self.kept}")
        return True

    def passed_on(self, number: int, rank: int) -> None:
        """Take a signal to a process of a teacher for one to this process, unless that has had one."""
        if not self.received:
            self.received = number
            self._say(f"rank {rank} received {signal.Signals(number).name}: {self.notice}")

    def _say(self, text: str) -> None:
        if self.speaks:
            line_break = "\n" if os.isatty(2) else ""  # after the ^C of the terminal
            with suppress(OSError):  # the terminal is gone
                os.write(2, f"{line_break}{text}\n".encode())


def _has_torchrun(environment: Mapping[str, str]) -> bool:
    """Return True if torchrun handles signals. mkd's own launcher forwards each once, and sends no others."""
    return "TORCHELASTIC_RUN_ID" in environment and LAUNCHER not in environment


@contextmanager
def caught_signals(afterwards: signal.Handlers | None = None) -> Iterator[Signals]:
    """Catch `SIGNALS` inside the block instead of ending the process.

    A second Ctrl-C raises KeyboardInterrupt, and ends the process if the block is still running after
    `FORCED_S`. Afterwards the earlier handlers are restored. If `afterwards` is given, it replaces them
    without a gap.
    """
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():  # where Python delivers no signals
        yield signals
        return

    def catch(number, frame) -> None:
        signals.received = signals.received or number
        if signals.is_forced:
            raise KeyboardInterrupt

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    is_over = threading.Event()
    listener = threading.Thread(target=_listen, args=(reader, signals, is_over), name="signals", daemon=True)
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    caught = SIGNALS if is_ignored else (*SIGNALS, signal.SIGHUP)
    earlier = {number: signal.signal(number, catch) for number in caught}
    earlier_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    listener.start()
    try:
        yield signals
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler if afterwards is None else afterwards)
        signal.set_wakeup_fd(earlier_fd)
        is_over.set()
        with suppress(BlockingIOError):  # the pipe is full, which wakes the thread as well
            os.write(writer, bytes([END]))
        listener.join()
        os.close(reader)
        os.close(writer)


def _listen(reader: int, signals: Signals, is_over: threading.Event) -> None:
    """Acknowledge signals as they come, in a thread: Python's handlers wait for the main thread."""
    while not is_over.is_set():
        for number in os.read(reader, 64):
            if number in (*SIGNALS, signal.SIGHUP) and signals.came(number):
                for action in signals.when_forced:
                    action()
                _thread.interrupt_main()
                if not is_over.wait(FORCED_S):
                    sys.stdout.flush()
                    os._exit(EXIT_INTERRUPTED)


def _leave_terminal() -> None:
    """Send output to a terminal nowhere from now on: writing to one that is closed is an error."""
    with open(os.devnull, "wb") as nowhere:
        for descriptor in (1, 2):
            with suppress(OSError):
                if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                    os.dup2(nowhere.fileno(), descriptor)


def ignore_signals() -> None:
    """Ignore `SIGNALS` and SIGHUP from now on. Python's handlers would end with the interpreter."""
    for number in (*SIGNALS, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
