"""Workers of a loader end with its iterator or with the process, although they outlive signals."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.util import Finalize
from pathlib import Path

import pytest

from mkd.data.loader import read_ahead
from mkd.data.workers import worker_deaths_explained
from mkd.errors import DataError, MkdError
from tests.ranks import REPOSITORY
from tests.reported import refused

PROGRAM = """
import gc, multiprocessing, os, signal, sys, time
import torch.utils.data._utils as patience
from mkd.data.loader import read_ahead
from mkd.errors import DataError

patience.MP_STATUS_CHECK_INTERVAL = 0.2  # torch waits so long for a worker's end, twice

def make(samples):
    if samples == [3]:
        raise DataError("what", "why", "do", code="image-damaged")
    return samples

class Holder:
    def __init__(self, samples):
        self.itself = self  # only the garbage collector frees it
        self.batches = read_ahead(make, samples, num_workers=2, pin_memory=False)
        self.first = next(self.batches)

Holder([[number] for number in range(1, 3)])
assert len(multiprocessing.active_children()) == 2
gc.collect()
assert not multiprocessing.active_children(), "freed by the garbage collector"

failed = Holder([[number] for number in range(1, 9)])
try:
    list(failed.batches)
except DataError as error:
    failed.error = error
assert not multiprocessing.active_children(), "an error ended the iteration"

stopped = Holder([[number] for number in range(1, 3)])
next(stopped.batches)  # both workers are running
for worker in multiprocessing.active_children():
    os.kill(worker.pid, signal.SIGSTOP)
    print(worker.pid)
print("ends", flush=True)
if "killed" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def is_running(process: str) -> bool:
    """Return False for a process that is gone, or that nobody has waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def run_program(*arguments: str) -> tuple[int, str, str]:
    """Return (exit code, output, errors) after all workers of the program are gone, which are stopped."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, *arguments]
    ended = subprocess.run(command, cwd=REPOSITORY, timeout=90, capture_output=True, text=True)
    *workers, last = ended.stdout.split()
    deadline = time.monotonic() + 10
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(workers) == 2 and not any(map(is_running, workers))
    errors = [line for line in ended.stderr.splitlines() if "No CUDA runtime" not in line]  # newer Megatrons
    return ended.returncode, last, "\n".join(errors)


def test_a_process_never_waits_for_workers_that_nobody_ended():
    assert run_program() == (0, "ends", "")


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's prctl")
def test_workers_end_with_a_process_that_is_killed():
    assert run_program("killed") == (-signal.SIGKILL, "ends", "")


def unchanged(samples):
    return samples


def test_a_worker_that_dies_during_a_step_is_named():
    """Torch raises its error in a signal handler."""
    others = {process.pid for process in multiprocessing.active_children()}  # such as ranks
    with refused("data-worker-ended", MkdError), worker_deaths_explained():
        batches = read_ahead(unchanged, [[1], [2]], num_workers=1, pin_memory=False)
        assert next(batches) == [1]
        (worker,) = (one for one in multiprocessing.active_children() if one.pid not in others)
        os.kill(worker.pid, signal.SIGKILL)
        time.sleep(20)
    assert {process.pid for process in multiprocessing.active_children()} <= others


def crash_at_the_end(samples):
    """Let this worker abort when it ends; fail for [1]."""
    Finalize(None, os.abort, exitpriority=0)
    if samples == [1]:
        raise DataError("what", "why", "do", code="image-not-valid")
    return samples


@pytest.mark.parametrize("samples", [[[0]], [[0], [1], [2]]])
def test_a_worker_that_crashes_while_it_ends_hides_nothing(samples):
    others = set(multiprocessing.active_children())
    batches = read_ahead(crash_at_the_end, samples, num_workers=1, pin_memory=False)
    assert next(batches) == [0]
    if len(samples) == 1:
        batches.close()
    else:
        with refused("image-not-valid: what"):
            list(batches)
    assert set(multiprocessing.active_children()) <= others


def test_workers_of_a_fork_server():
    """It starts them in later versions of Python."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        assert list(read_ahead(unchanged, [[1], [2]], num_workers=1, pin_memory=False)) == [[1], [2]]
    finally:
        multiprocessing.set_start_method(before, force=True)
