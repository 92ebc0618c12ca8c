"""Workers of a loader end with its iterator or with the process, although they outlive signals."""

from __future__ import annotations

import subprocess
import sys

from tests.ranks import REPOSITORY

PROGRAM = """
import gc, multiprocessing
from mkd.data.loader import read_ahead
from mkd.errors import DataError

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

suspended = Holder([[number] for number in range(1, 3)])
print("ends")
"""


def test_a_process_never_waits_for_workers_that_nobody_ended():
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    ended = subprocess.run(command, cwd=REPOSITORY, timeout=90, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "ends\n"), ended.stderr
