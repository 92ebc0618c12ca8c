"""Worker processes of a DataLoader: they outlive signals, and end with their iterator or their parent."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from mkd.errors import MkdError
from mkd.parent_process import die_with_parent

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
DEAD_WORKER = "DataLoader worker"  # in torch's error about one
FEEDER_SECONDS = 10.0  # most that the end of a thread of the loader is waited for


def outlive_signals(worker: int) -> None:
    """Ignore signals in a worker: its parent process handles them and ends the worker.

    On Linux the worker is killed when the thread that started it is gone, whatever it waits for.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        die_with_parent()
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():  # it was gone before
            os._exit(1)


@contextmanager
def iterating(loader: DataLoader[Any]) -> Iterator[Iterator[Any]]:
    """Give an iterator over `loader`, and end its workers after the block, at the latest with this process.

    torch ends them when the iterator is freed. If the garbage collector frees it, or if this process ends
    first, workers are only sent SIGTERM: this process would wait for those that ignore it, for ever. A worker
    that does not answer is killed after 10 s, one after the other.
    """
    feeders = set[threading.Thread]()
    with _new_feeders(feeders):
        batches = iter(loader)
    end = partial(_end, batches)
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
def worker_deaths_explained() -> Iterator[None]:
    """Turn torch's error about a dead worker into an MkdError.

    torch raises it in a signal handler, wherever this process is at that time.
    """
    try:
        yield
    except RuntimeError as error:
        if DEAD_WORKER not in str(error):
            raise
        raise worker_ended(error) from error


def worker_ended(error: Exception) -> MkdError:
    """Return the error for a worker that has ended, of which this process learnt by `error`."""
    what, do = "a process that loads data has ended", "give the job more memory, or lower --num-workers"
    why = f"torch says: {error}"
    if "Interrupt" not in why and "Terminated" not in why:  # the names of signals that people send
        why = f"torch says: {error}; often the system has no memory left"
    return MkdError(what, why, do, code="data-worker-ended")


@contextmanager
def _new_feeders(feeders: set[threading.Thread]) -> Iterator[None]:
    """Add the threads to `feeders` that feed workers and start in the block."""
    earlier = set(threading.enumerate())
    yield
    started = set(threading.enumerate()) - earlier
    feeders.update(thread for thread in started if thread.name == "QueueFeederThread")


def _end(batches: Iterator[Any]) -> None:
    """End the workers of an iterator; those that torch cannot end, because they are stopped, are killed."""
    # torch has no public names for them
    shut_down, workers = getattr(batches, "_shutdown_workers", None), getattr(batches, "_workers", ())
    try:
        if shut_down is not None:
            shut_down()
    except RuntimeError as error:
        # A worker that crashes while it ends does no harm, and the block may have failed for another reason.
        if DEAD_WORKER not in str(error):
            raise
    for worker in workers:
        if worker.is_alive():
            worker.kill()
