"""Worker processes of a DataLoader: they outlive signals, and end with their iterator or this process."""

from __future__ import annotations

import atexit
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
FEEDER_SECONDS = 10.0  # most that the end of a thread of the loader is waited for


def outlive_signals(worker: int) -> None:
    """Ignore signals in a worker: its parent process handles them and ends the worker."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def iterating(loader: DataLoader[Any]) -> Iterator[Iterator[Any]]:
    """Give an iterator over `loader`, and end its workers after the block, at the latest with this process.

    torch ends them when the iterator is freed. If the garbage collector frees it, or if this process ends
    first, workers are only sent SIGTERM: this process would wait for those that ignore it, for ever.
    """
    feeders = set[threading.Thread]()
    with _new_feeders(feeders):
        batches = iter(loader)
    end = getattr(batches, "_shutdown_workers", _nothing)  # torch has no public name for it
    atexit.register(end)
    try:
        yield batches
    finally:
        atexit.unregister(end)
        with _new_feeders(feeders):
            end()
        # The loader leaves the threads that feed its workers to themselves. One that still frees semaphores
        # when this process ends makes Python warn of leaked ones.
        for thread in feeders:
            thread.join(FEEDER_SECONDS)


@contextmanager
def _new_feeders(feeders: set[threading.Thread]) -> Iterator[None]:
    """Add the threads to `feeders` that feed workers and start in the block."""
    earlier = set(threading.enumerate())
    yield
    started = set(threading.enumerate()) - earlier
    feeders.update(thread for thread in started if thread.name == "QueueFeederThread")


def _nothing() -> None:
    """Stand for the end of workers where there are none."""
