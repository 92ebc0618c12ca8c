"""Run commands of mkd one after the other, each in a process that gets the signals of this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mkd.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED
from mkd.operations.launch.local_ranks import forwarded_signals
from mkd.parent_process import LAUNCHER, STAGE


@dataclass
class ChildCommands:
    """Runs commands; a signal ends the one that runs, and no other one starts after that."""

    received: list[int] = field(default_factory=list)
    _child: subprocess.Popen[bytes] | None = None
    _num_sent: int = 0  # of `received`

    @contextmanager
    def signals_forwarded(self) -> Iterator[None]:
        """Forward signals to the running command inside the block. In other threads it does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        earlier = {number: signal.signal(number, self._catch) for number in forwarded_signals()}
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    def run(self, words: Sequence[str]) -> int:
        """Run `mkd WORDS` and return its exit code; that of a stop if a signal has come.

        The process does not outlive this one. It is in a session of its own, so that a Ctrl-C reaches it
        once, from here.
        """
        if self.received:
            return self._code_of_stop()
        own = str(Path(__file__).resolve().parents[3])  # a checkout is not installed
        on_path = [own, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = {**os.environ, LAUNCHER: str(os.getpid()), STAGE: "1", "PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(on_path))
        sys.stdout.flush()
        command = [sys.executable, "-m", "mkd", *words]
        self._child = subprocess.Popen(command, env=environment, start_new_session=True)
        self._forward()  # what came while it started
        code = self._child.wait()
        self._child = None
        if code and self.received and (code < 0 or code == EXIT_INTERRUPTED):
            return self._code_of_stop()
        return code if code >= 0 else 128 - code

    def _code_of_stop(self) -> int:
        return EXIT_INTERRUPTED if self.received[0] == signal.SIGINT else EXIT_PREEMPTED

    def _catch(self, number: int, frame: Any) -> None:
        self.received.append(number)
        self._forward()

    def _forward(self) -> None:
        """Send the running command each signal that it has not got yet, once."""
        while self._child is not None and self._num_sent < len(self.received):
            number = self.received[self._num_sent]
            self._num_sent += 1
            with suppress(ProcessLookupError):
                self._child.send_signal(number)
