"""Ctrl-C while a model writes: all ranks stop after the same token."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
WAIT = timedelta(days=7)  # for the next message of a person


class Ranks:
    """Messages of rank 0 to the others, over gloo: a GPU does not spin while a person thinks."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=WAIT) if self.size > 1 else None
        self._is_interrupted = False

    @property
    def is_first(self) -> bool:
        """True if this rank talks with the person."""
        return self.rank == 0

    def share(self, value: T) -> T:
        """Return the value of rank 0 on every rank. Collective."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group, device=torch.device("cpu"))
        return box[0]

    def is_interrupted(self) -> bool:
        """Return True if rank 0 has received SIGINT inside `interruptible`. Collective."""
        if self.size == 1:
            return self._is_interrupted
        flag = torch.tensor(self._is_interrupted, dtype=torch.uint8)
        dist.broadcast(flag, src=0, group=self._group)
        return bool(flag)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Note the first SIGINT inside the block; a second one raises KeyboardInterrupt on rank 0."""
        self._is_interrupted = False

        def catch(number: int, frame: Any) -> None:
            if self._is_interrupted and self.size == 1:
                raise KeyboardInterrupt
            self._is_interrupted = True

        earlier = signal.signal(signal.SIGINT, catch)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, earlier)
