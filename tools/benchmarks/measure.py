"""Measure time and peak memory of calls. Arms run interleaved, so that the machine's drift affects all alike.

Their order differs in every round, and is the same on all ranks: the previous arm decides how warm a GPU is
and how high it clocks, so it must not always be the same one.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Arm:
    """One thing to time: `run` is timed, `prepare` (restore inputs that `run` overwrites) is not."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = _nothing


def time_arms(
    arms: Sequence[Arm], device: torch.device, rounds: int, warmup: int = 2, across_ranks: bool = True
) -> dict[str, float]:
    """Return the median time of every arm in ms, over `rounds` interleaved rounds.

    `warmup` rounds come first (compilation, caches, autotuning). With several processes, `across_ranks` takes
    the slowest one's time in every round.
    """
    times: dict[str, list[float]] = {arm.name: [] for arm in arms}
    order = random.Random(0)
    for index in range(warmup + rounds):
        for arm in order.sample(arms, len(arms)):
            elapsed = _time_once(arm, device)
            if across_ranks:
                elapsed = _slowest(elapsed, device)
            if index >= warmup:
                times[arm.name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}


def _time_once(arm: Arm, device: torch.device) -> float:
    """Time one call in ms.

    On a GPU `prepare` is queued just before, to hide the launch of the first kernels.
    """
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        arm.prepare()
        start.record()
        arm.run()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end)
    arm.prepare()
    begin = time.perf_counter()
    arm.run()
    return 1000 * (time.perf_counter() - begin)


def _slowest(elapsed_ms: float, device: torch.device) -> float:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return elapsed_ms
    slowest = torch.tensor(elapsed_ms, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def peak_bytes(arm: Arm, device: torch.device) -> int:
    """Return the largest number of bytes that one call adds to those before it, its results included."""
    arm.prepare()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        arm.run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with StorageCounter() as counter:
        arm.run()
    return counter.peak


class StorageCounter(TorchDispatchMode):
    """Count the bytes of live tensor storages that were created inside. `peak` is their largest sum."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._seen: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._seen.setdefault(tensor.untyped_storage(), True)  # existed before
        result = function(*args, **kwargs)
        for tensor in _tensors(result):
            self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen[storage] = True
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.live -= size


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
