"""Explain an out-of-memory error, and propose settings that make the run fit.

The explanation compares the planned with the actual memory of the GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mkd.errors import OutOfMemory
from mkd.operations.failures import NCCL_ALLOCATES
from mkd.plan.advice.verdict import SHOWN, fullest_rank, left_out, remedies
from mkd.plan.footprint.memory import GIB, RankMemory
from mkd.plan.forecast import Forecast
from mkd.plan.times.hardware import USABLE

FULL = 0.01  # share of the GPU: less is free than this and what NCCL asked for, if memory was the cause
SHARED_GIB = 1.0  # beyond the plan for CUDA and NCCL: other processes are on the GPU
FRAGMENTED = 0.1  # share of the GPU that torch's allocator reserves but cannot use
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "bytes": 1}


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one GPU at the moment of the failure, GiB."""

    total: float
    free: float
    allocated: float  # by tensors now
    peak: float  # peak of tensors
    reserved: float  # by torch's allocator, including memory for later tensors

    @classmethod
    def now(cls) -> DeviceMemory | None:
        """Measure this process's GPU; return None without one."""
        if not torch.cuda.is_available():
            return None
        free, total = torch.cuda.mem_get_info()
        stats = torch.cuda.memory_stats()
        names = ("allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current")
        return cls(total / GIB, free / GIB, *(stats[name] / GIB for name in names))

    @property
    def others(self) -> float:
        """Memory of CUDA, NCCL and other processes."""
        return self.total - self.free - self.reserved

    def describe(self) -> str:
        return (
            f"tensors have {self.allocated:.2f} GiB (at most {self.peak:.2f}), torch's allocator holds "
            f"{self.reserved - self.allocated:.2f} more, CUDA, NCCL and other processes {self.others:.2f}, "
            f"{self.free:.2f} of {self.total:.1f} are free"
        )


@contextmanager
def memory_explained(forecast: Forecast, rank: int, world_size: int) -> Iterator[None]:
    """Turn out-of-memory errors of torch and NCCL inside the block into OutOfMemory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise explain(error, forecast, rank, world_size, DeviceMemory.now()) from error
    except dist.DistBackendError as error:
        device = _full_device(str(error))
        if device is None:
            raise
        raise explain(error, forecast, rank, world_size, device) from error


def _full_device(text: str) -> DeviceMemory | None:
    """Return the memory of this GPU if NCCL says in `text` that it got none, and too little is free."""
    if not NCCL_ALLOCATES.search(text):
        return None
    try:
        device = DeviceMemory.now()
    except RuntimeError:  # a broken GPU does not answer
        return None
    return device if device and device.free < _wanted_gib(text) + FULL * device.total else None


def explain(
    error: Exception, forecast: Forecast, rank: int, world_size: int, device: DeviceMemory | None
) -> OutOfMemory:
    """Return the error for the user: planned and actual memory of this rank, and changes that help."""
    pipeline_rank = rank // (world_size // forecast.config.parallel.pipeline_model_parallel_size)
    planned = forecast.memory.ranks[pipeline_rank]
    wanted = _wanted_gib(str(error))
    why = f"planned for pipeline rank {pipeline_rank}: {planned.describe()}"
    if device:
        why += f"\n       in use: {device.describe()}"
    asked = f" when it asked for {wanted:.2f} GiB more" if wanted else ""
    do = "one of these, with predicted memory and step time:\n"
    do += _remedies(forecast, planned, device, wanted)
    return OutOfMemory(f"GPU memory is not enough on rank {rank}{asked}", why, do, code="out-of-gpu-memory")


def _remedies(forecast: Forecast, planned: RankMemory, device: DeviceMemory | None, wanted: float) -> str:
    """Return the first changes that shrink the plan by the missing memory and the plan's own error."""
    _, need = fullest_rank(forecast)
    if device:
        missed = max(0.0, device.total - device.free + wanted - planned.total_gib)
        usable = USABLE * device.total - missed
    else:
        usable = USABLE * need
    found = remedies(forecast, min(usable, USABLE * need))[:SHOWN]
    lines = [f"  {place}. {remedy.describe()}" for place, remedy in enumerate(found, 1)]
    if left_out(found):
        lines.append(f"  (times{left_out(found)})")
    if not lines:
        lines = ["  use more GPUs, a larger --pipeline-model-parallel-size, or a shorter --seq-length"]
    if device and device.others - planned.device_gib > SHARED_GIB:
        lines.append("  or, if other processes are on this GPU: end them")
    if device and device.reserved - device.allocated > FRAGMENTED * device.total:
        lines.append("  or, since much of it is fragments: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    return "\n".join(lines)


def _wanted_gib(text: str) -> float:
    """Return the size of the failed allocation from the message of torch or NCCL; 0 if it has none."""
    if found := re.search(r"Tried to allocate ([\d.]+) (KiB|MiB|GiB|bytes)", text):
        return float(found[1]) * UNITS[found[2]] / GIB
    found = NCCL_ALLOCATES.search(text)
    return int(found[1]) / GIB if found else 0.0
