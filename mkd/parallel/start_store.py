"""The store at which the processes that torchrun has started meet."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # set by torchrun: 0 at first, one more for each of --max-restarts
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # set by torchrun, which then hosts the store
ATTEMPT = "MKD_ATTEMPT"  # set here: the number that the processes of several machines have agreed on
POLL_S = 0.05


def start_store(timeout: timedelta) -> dist.Store:
    """Return the store of this start. Call it with torchrun's environment.

    torchrun keeps one store for all its restarts, so a restarted process would find what those that are gone
    have left: their addresses (pytorch #135712), and what they told each other. Every attempt therefore has
    its own keys. On one machine torchrun numbers the attempts. On several, each torchrun counts only the
    failures of its own machine, so the processes agree on a number: the first call is then collective.
    """
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    if not needs_own_keys():
        return store
    if not _is_one_machine() and ATTEMPT not in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        os.environ[ATTEMPT] = str(agree_on_attempt(store, rank, size, timeout))
    number = os.environ[RESTARTS if _is_one_machine() else ATTEMPT]
    return dist.PrefixStore(f"mkd/attempt {number}", store)


def needs_own_keys() -> bool:
    """Return True if the store may have keys of an earlier attempt."""
    if _is_one_machine():
        return os.environ.get(RESTARTS, "0") != "0"
    return os.environ.get(AGENT_STORE) == str(True)


def _is_one_machine() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


def agree_on_attempt(store: dist.Store, rank: int, size: int, timeout: timedelta) -> int:
    """Return the number of this attempt: equal on all its processes, and of no earlier one. Collective.

    Each process takes a ticket, which none has had before. That of rank 0 is the attempt's number, with which
    rank 0 answers all tickets, also of processes that are gone, until it hears from every rank. No process
    therefore reads a key that an earlier attempt may have written. Raises an error of torch.distributed if
    the others do not come within `timeout`.
    """
    place = dist.PrefixStore("mkd/attempts", store)
    ticket = place.add("tickets", 1)
    if rank:
        answer = f"answer to {ticket}"
        place.wait([answer], timeout)
        attempt = int(place.get(answer))
        place.set(f"{attempt} is known to {rank}", "")
        return attempt
    others = [f"{ticket} is known to {other}" for other in range(1, size)]
    answered, deadline = place.add("answered", 0), time.monotonic() + timeout.total_seconds()
    while not place.check(others) and time.monotonic() < deadline:
        latest = place.add("tickets", 0)
        for one in range(answered + 1, latest + 1):
            place.set(f"answer to {one}", str(ticket))
        if latest > answered:
            answered = place.add("answered", latest - answered)
        time.sleep(POLL_S)
    place.wait(others, timedelta(seconds=1))
    return ticket
