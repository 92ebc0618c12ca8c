"""A process that is stopped is missed by the other side, and all report one cause."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 2.0
LOADING = 6  # times the limit, during the start
PEER = f"""
import sys, time
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from mkd.operations.heartbeat import Heartbeat
from mkd.operations.phases import FORWARD_BACKWARD, INIT

port, rank, phase, others = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], map(int, sys.argv[4:])
store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
beat = Heartbeat(store, rank, 3, tuple(others), phase=lambda: phase, limit_s={LIMIT_S}, hosts_store=False)
beat.start()
print("begun", flush=True)
while True:
    time.sleep(0.05)
    if (silent := beat.silence()) is not None:
        print(beat.post(silent).describe(), flush=True)
        break
    if beat.first is not None:
        print(beat.first.describe(), flush=True)
        break
"""


@contextmanager
def processes(*argv: list, store: int):
    """Start processes of `PEER`, and wait until they have begun."""
    started = []
    try:
        for words in argv:
            command = [sys.executable, "-c", PEER, str(store), *map(str, words)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            pipe = subprocess.PIPE
            one = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, text=True)
            started.append(one)
        assert [one.stdout.readline() for one in started] == ["begun\n"] * len(started)
        yield started
    finally:
        for one in started:
            one.kill()
            one.wait()
            one.stdout.close()


@pytest.fixture
def store():
    """Yield the port of a store that another process hosts, as torchrun does, and that process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = (
        "import torch.distributed as dist, time, sys\n"
        f"store = dist.TCPStore('127.0.0.1', {port}, is_master=True, wait_for_workers=False)\n"
        "print('begun', flush=True)\ntime.sleep(600)"
    )
    host = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert host.stdout.readline() == "begun\n"
    yield port, host
    host.kill()
    host.wait()
    host.stdout.close()


STUDENT, TEACHER = [0, "forward_backward", 1, 2], [1, "forward_backward", 0]
OTHER = [2, "forward_backward"]  # a second process of the teacher, which reads nobody


@pytest.mark.fault("37 stopped")
@pytest.mark.parametrize("stopped", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_stopped_process_is_missed_and_all_say_so(store, stopped):
    """Also one that is not the first of its side."""
    with processes(STUDENT, TEACHER, OTHER, store=store[0]) as started:
        time.sleep(1.5)  # beats without an alarm
        assert all(one.poll() is None for one in started)
        began = time.monotonic()
        started[stopped].send_signal(signal.SIGSTOP)
        said = [one.stdout.readline() for rank, one in enumerate(started) if rank != stopped]
        assert LIMIT_S - 0.5 < time.monotonic() - began < LIMIT_S + 5
        started[stopped].send_signal(signal.SIGCONT)
        said.append(started[stopped].stdout.readline())  # it learns that it was given up
        cause = f"stopped because rank {stopped} failed: it gave no sign of life for 2 s: stopped, or its"
        assert len(set(said)) == 1 and said[0].startswith(cause), said


@pytest.mark.fault("37 stopped")
@pytest.mark.slow
def test_a_store_that_does_not_answer(store):
    with processes(STUDENT, TEACHER, store=store[0]) as started:
        store[1].send_signal(signal.SIGSTOP)
        lines = [one.stdout.readline() for one in started]
        cause = "the store of the launch, which the launcher of its machine hosts, did not answer for 2 s"
        assert all(f"rank 0 failed: {cause}" in line for line in lines), lines


@pytest.mark.fault("37 busy")
@pytest.mark.slow  # pauses of more than five seconds
def test_a_reader_that_was_paused_starts_over(store):
    """All processes stand still, as on a machine that sleeps: nobody is missed afterwards."""
    with processes(STUDENT, TEACHER, store=store[0]) as started:
        time.sleep(1)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for one in started:
                one.send_signal(number)
                time.sleep(0.3)
            time.sleep(7)
        assert [one.poll() for one in started] == [None, None]


@pytest.mark.slow
def test_a_start_may_take_longer(store):
    """A library may hold the interpreter while it reads weights."""
    with processes(STUDENT, [1, "init"], store=store[0]) as started:
        began = time.monotonic()
        started[1].send_signal(signal.SIGSTOP)
        assert f"for {LOADING * LIMIT_S:g} s" in started[0].stdout.readline()
        assert time.monotonic() - began > LOADING * LIMIT_S - 0.5


def test_the_first_reason_stays_and_an_earlier_start_has_none(store):
    import json
    from dataclasses import asdict

    import torch.distributed as dist

    from mkd.operations.failures import Failure
    from mkd.operations.heartbeat import REASON, Heartbeat

    def heartbeat(rank: int) -> Heartbeat:
        client = dist.TCPStore("127.0.0.1", store[0], is_master=False, timeout=timedelta(seconds=60))
        return Heartbeat(client, rank, 2, (1 - rank,), hosts_store=False).start()

    client = dist.TCPStore("127.0.0.1", store[0], is_master=False, timeout=timedelta(seconds=60))
    old = Failure(1, time.time() - 3600, 1, "an earlier start", "")
    dist.PrefixStore("mkd/heartbeat", client).set(REASON, json.dumps(asdict(old)))
    first, second = heartbeat(0), heartbeat(1)
    time.sleep(1.2)
    assert first.first is None and second.first is None
    own, later = (Failure(rank, time.time(), 1, f"rank {rank}", "") for rank in (1, 0))
    assert second.post(own) == own
    assert first.post(later) == own == second.first
    for one in (first, second):
        one.close()


def test_who_says_goodbye_is_not_missed(store):
    import torch.distributed as dist

    from mkd.operations.heartbeat import GONE, Heartbeat

    def heartbeat(rank: int, others: tuple[int, ...]) -> Heartbeat:
        client = dist.TCPStore("127.0.0.1", store[0], is_master=False, timeout=timedelta(seconds=60))
        return Heartbeat(client, rank, 3, others, limit_s=LIMIT_S, hosts_store=False).start()

    first, second, third = heartbeat(0, (1, 2)), heartbeat(1, ()), heartbeat(2, ())
    first.phase = second.phase = third.phase = lambda: "eval"
    second.close()
    first.missed = frozenset({1, 2})  # as the watchdog sees that their processes are gone
    deadline = time.monotonic() + 10
    while not first.dead:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert first.dead == {2} and first.said[1]["phase"] == GONE
    time.sleep(LIMIT_S + 1)
    assert first.silence() is None
    for one in (first, third):
        one.close()
