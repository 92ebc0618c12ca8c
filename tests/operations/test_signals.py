"""Signals are acknowledged at once, and a second Ctrl-C ends the process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.fault(13)
def test_signals_are_noted_once_and_handlers_come_back():
    from mkd.operations.signals import caught_signals

    before = signal.getsignal(signal.SIGUSR1)
    with caught_signals() as signals:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        assert signals.received == signal.SIGUSR1
    assert signal.getsignal(signal.SIGUSR1) == before
    with caught_signals(afterwards=signal.SIG_IGN):
        pass
    assert signal.signal(signal.SIGTERM, before) == signal.signal(signal.SIGUSR1, before) == signal.SIG_IGN


def wait_for(capfd, text: str) -> None:
    """Wait until `text` was printed on stderr."""
    printed, deadline = "", time.monotonic() + 10
    while text not in printed:
        assert time.monotonic() < deadline, printed
        printed += capfd.readouterr().err
        time.sleep(0.01)


def test_the_second_ctrl_c_interrupts(capfd):
    from mkd.operations.phases import FORWARD_BACKWARD, Phases
    from mkd.operations.signals import caught_signals
    from mkd.operations.stopping import StopNotice

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), caught_signals() as signals:
        notice = StopNotice(signals, "runs/kd")
        phases = Phases(notice)
        phases.moment("after_pointer", 6)
        phases.enter(FORWARD_BACKWARD, 8)
        signal.raise_signal(signal.SIGINT)
        wait_for(
            capfd, "stopping after step 8, then saving; press Ctrl-C again to stop now and lose 2 steps\n"
        )
        assert signals.received == signal.SIGINT and not signals.is_forced
        signal.raise_signal(signal.SIGINT)
        wait_for(capfd, "stopping now; runs/kd/iter_0000006 is saved: --load runs/kd resumes there\n")
        time.sleep(10)
    assert signals.is_forced


@pytest.mark.parametrize(
    ("has_torchrun", "numbers", "second"),
    [
        (False, [signal.SIGINT, signal.SIGINT, signal.SIGINT], 1),
        (True, [signal.SIGINT, signal.SIGINT, signal.SIGINT], 2),  # the second one is torchrun's copy
        (True, [signal.SIGINT, signal.SIGTERM], 1),  # torchrun got the second one
        (False, [signal.SIGINT, signal.SIGTERM], None),
        (True, [signal.SIGTERM, signal.SIGTERM], None),
        (True, [signal.SIGINT, signal.SIGUSR1], None),
        (False, [signal.SIGUSR1, signal.SIGINT], 1),
    ],
)
def test_what_counts_as_a_second_ctrl_c(has_torchrun, numbers, second):
    from mkd.operations.signals import Signals

    signals = Signals(speaks=False, has_torchrun=has_torchrun)
    assert [signals.came(number) for number in numbers] == [i == second for i in range(len(numbers))]


LONG_CALL = """
import hashlib, threading, time
from mkd.operations.signals import caught_signals

def say():  # not before the call: a signal would interrupt Python itself, which is another case
    clock = time.pthread_getcpuclockid(threading.main_thread().ident)
    start = time.clock_gettime(clock)
    while time.clock_gettime(clock) - start < 0.2:
        time.sleep(0.01)
    print("computing", flush=True)

with caught_signals():
    threading.Thread(target=say, daemon=True).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # as a step that never returns to Python
"""


def test_signals_are_answered_in_the_middle_of_a_computation():
    command = [sys.executable, "-c", LONG_CALL]
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, cwd=ROOT, **streams) as process:
        try:
            assert process.stdout.readline() == "computing\n"
            for answer in ("stopping when the start is over", "stopping now"):
                process.send_signal(signal.SIGINT)
                assert process.stderr.readline().startswith(answer)
            assert process.wait(timeout=30) == 130 and process.stderr.read() == ""
        finally:
            process.kill()


def test_a_closed_terminal_ends_a_run_unless_it_is_ignored(monkeypatch):
    """The run saves; `nohup` lets it continue."""
    from mkd.operations import signals as module

    monkeypatch.setattr(module, "_leave_terminal", lambda: None)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with module.caught_signals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert signals.received == signal.SIGHUP
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with module.caught_signals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert signals.received == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
