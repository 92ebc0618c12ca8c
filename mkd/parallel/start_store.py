"""The store at which the processes that torchrun has started meet."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

ATTEMPT = "TORCHELASTIC_RESTART_COUNT"  # set by torchrun: 0 at first, one more for each of --max-restarts


def start_store(timeout: timedelta) -> dist.Store:
    """Return the store of this start. Call it with torchrun's environment.

    torchrun keeps one store for all its restarts, so a restarted process would find the addresses of those
    that are gone (pytorch #135712). On one machine every restart therefore has its own keys. On several, each
    torchrun counts only the failures of its own machine, so the numbers differ and name no common keys.
    """
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return dist.PrefixStore(f"mkd/attempt {os.environ[ATTEMPT]}", store) if needs_own_keys() else store


def needs_own_keys() -> bool:
    """Return True if torchrun has restarted all ranks, which are on this machine."""
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    return is_one_machine and os.environ.get(ATTEMPT, "0") != "0"
