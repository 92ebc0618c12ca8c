"""Communication between the sides of a run, whose default process groups do not know each other.

Each side has its own default process group under a prefix of the launch's store, so that Megatron and mkd run
unchanged on both. A `Bridge` is a communicator of torch's backends that belongs to no process group.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.parallel.start_store import start_store
from mkd.plan.sides import Side
from mkd.platform import Platform

T = TypeVar("T")

PATIENCE = timedelta(days=1)
"""Timeout between sides: one waits while the other saves, evaluates or samples. Watchdogs see what hangs."""
MAX_CTAS = 2
"""Streaming multiprocessors that a transfer between sides may take: a state has the time of a micro-batch."""


@dataclass(frozen=True)
class Launch:
    """All processes of a launch with several sides, at their store."""

    store: dist.Store
    rank: int  # among all processes of the launch
    size: int

    @classmethod
    def meet(cls, rank: int, size: int, timeout: timedelta) -> Launch:
        """Return the launch of this process, from the environment of its launcher."""
        return cls(start_store(timeout), rank, size)

    def join(self, side: Side, platform: Platform, timeout: timedelta) -> None:
        """Join the default process group of this process's side. Collective on the side."""
        # With a device, all groups get their communicators at once. A process that is alone needs few.
        device_id = platform.device if platform.is_cuda and side.size > 1 else None
        dist.init_process_group(
            platform.backend,
            store=dist.PrefixStore(f"mkd/side {side.name}", self.store),
            rank=self.rank - side.first,
            world_size=side.size,
            timeout=timeout,
            device_id=device_id,
        )

    def await_student(self, name: str, is_teacher: bool) -> None:
        """Let a teacher's process wait until the student's processes come here, which read the data first."""
        key = f"mkd/student is at {name}"
        if is_teacher:
            self.store.wait([key], PATIENCE)
        else:
            self.store.set(key, "here")

    def gather(self, name: str, value: T) -> list[T]:
        """Return the values (JSON) of all processes of the launch, by rank. Collective, once for a name."""
        place = dist.PrefixStore(f"mkd/gathered {name}", self.store)
        place.set(str(self.rank), json.dumps(value))
        return [json.loads(place.get(str(rank))) for rank in range(self.size)]


class Bridge:
    """A communicator between some processes of two sides. Its messages are sent and received in order."""

    def __init__(
        self,
        store: dist.Store,
        name: str,
        rank: int,
        size: int,
        device: torch.device,  # of the tensors that it carries
    ):
        """Meet the other processes of the bridge. Collective on them."""
        place = dist.PrefixStore(f"mkd/bridge {name}", store)
        self.rank, self.device = rank, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._backend: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = PATIENCE
            options.config.max_ctas = MAX_CTAS
            self._backend = dist.ProcessGroupNCCL(place, rank, size, options)
        else:
            self._backend = dist.ProcessGroupGloo(place, rank, size, PATIENCE)

    def warm_up(self, senders: Sequence[int], receivers: Sequence[int]) -> None:
        """Exchange a number between all pairs. Collective.

        NCCL connects a pair at its first message, for which both must wait at the same time.
        """
        for sender in senders:
            for receiver in receivers:
                number = torch.zeros(1, device=self.device)
                if self.rank == sender:
                    self.send(number, receiver).wait()
                elif self.rank == receiver:
                    self.receive(self.new_buffer([1], number.dtype), sender).wait()

    def mark(self) -> torch.cuda.Event | None:
        """Return a mark behind what the current stream has queued, for `send`; None without a GPU."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def send(self, tensor: Tensor, receiver: int, ready: torch.cuda.Event | None = None) -> Transfer:
        """Send a contiguous tensor, which must stay as it is until the transfer is over.

        On a GPU, the transfer waits for `ready`, by default for what the current stream has queued.
        """
        if self._stream is not None:
            ready = ready or self.mark()
            self._stream.wait_event(ready)
        with self._beside():
            return Transfer(self._backend.send([tensor], receiver, 0), tensor)

    def receive(self, tensor: Tensor, sender: int) -> Transfer:
        """Post the receive of a tensor of `new_buffer`."""
        with self._beside():
            return Transfer(self._backend.recv([tensor], sender, 0), tensor)

    def new_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory for a receive: no work that is queued uses it."""
        with self._beside():
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def _beside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def close(self) -> None:
        """End the communicator. No transfer is under way."""
        with suppress(AttributeError):  # gloo's ends with its last reference
            self._backend.shutdown()


@dataclass(frozen=True)
class Transfer:
    """A send or a receive that has been posted, and its tensor, which lives as long."""

    work: dist.Work
    tensor: Tensor

    def wait(self) -> Tensor:
        """Wait until it is over, and return its tensor. On a GPU, the current stream waits."""
        self.work.wait()
        if self.tensor.is_cuda:
            self.tensor.record_stream(torch.cuda.current_stream(self.tensor.device))
        return self.tensor
