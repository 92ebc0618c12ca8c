"""One thread on a machine whose cores other processes fill."""

from __future__ import annotations

import os
import sys

BUSY = 2.0  # processes that want to run, for each core


def share_cores() -> None:
    """Compute with one thread if the machine is busy, unless OMP_NUM_THREADS is set.

    Threads of one product wait for each other: beside 45 processes for each of two cores, two threads
    needed more than six times as long as one (docs/decisions/2026-11-27-journey.md).
    """
    if "OMP_NUM_THREADS" in os.environ or not is_busy():
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    line = "more processes want to run than this machine has cores: one thread, which waits for no other"
    print(line, file=sys.stderr, flush=True)


def is_busy() -> bool:
    """Return True if other processes fill the cores of this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores > 1 and hasattr(os, "getloadavg") and os.getloadavg()[0] > BUSY * cores
