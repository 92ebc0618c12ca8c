"""One thread on a machine whose cores other processes fill."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

BUSY = 2.0  # processes that want to run, for each core


def share_cores(say: Callable[[str], None] = print) -> None:
    """Compute with one thread if the machine is busy, unless OMP_NUM_THREADS is set.

    Threads of one product wait for each other: beside 45 processes for each of two cores, two threads
    needed more than six times as long as one (docs/decisions/2026-11-27-journey.md).
    """
    if "OMP_NUM_THREADS" in os.environ or not hasattr(os, "getloadavg"):
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    if cores == 1 or load < BUSY * cores:
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    say(f"{load:.0f} processes want to run on {cores} cores: one thread, which does not wait for others")
