"""What a GPU's memory was meant for, what it went to, and which settings make the run fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mkd.errors import OutOfMemory
from mkd.plan.forecast import Forecast
from mkd.plan.memory import GIB, RankMemory
from mkd.plan.verdict import SHOWN, USABLE, fullest_rank, remedies
from mkd.run.run_plan import Plan

FRAGMENTED = 0.1  # share of the GPU that torch's allocator holds and cannot give
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "bytes": 1}


@dataclass(frozen=True)
class DeviceMemory:
    """One GPU at the moment of the failure, GiB."""

    total: float
    free: float
    allocated: float  # by tensors now ...
    peak: float  # ... and at most
    reserved: float  # by torch, with what it holds for later

    @classmethod
    def now(cls) -> DeviceMemory | None:
        """Of this process's GPU; None without one."""
        if not torch.cuda.is_available():
            return None
        free, total = torch.cuda.mem_get_info()
        stats = torch.cuda.memory_stats()
        names = ("allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current")
        return cls(total / GIB, free / GIB, *(stats[name] / GIB for name in names))

    def describe(self) -> str:
        others = self.total - self.free - self.reserved
        return (
            f"tensors have {self.allocated:.2f} GiB (at most {self.peak:.2f}), torch's allocator holds "
            f"{self.reserved - self.allocated:.2f} more, CUDA, NCCL and other processes {others:.2f}, "
            f"{self.free:.2f} of {self.total:.1f} are free"
        )


@contextmanager
def memory_explained(plan: Plan, rank: int, world_size: int) -> Iterator[None]:
    """Inside, torch's out-of-memory errors become OutOfMemory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise explain(error, plan, rank, world_size, DeviceMemory.now()) from error


def explain(
    error: torch.OutOfMemoryError, plan: Plan, rank: int, world_size: int, device: DeviceMemory | None
) -> OutOfMemory:
    """The error for the user: planned and actual memory of this rank, and what to change."""
    forecast = plan.forecast
    pipeline_rank = rank // (world_size // plan.config.parallel.pipeline_model_parallel_size)
    planned = forecast.memory().ranks[pipeline_rank]
    wanted = _wanted_gib(str(error))
    why = f"planned for pipeline rank {pipeline_rank}: {planned.describe()}"
    if device:
        why += f"\n       in use: {device.describe()}"
    asked = f" when it asked for {wanted:.2f} GiB more" if wanted else ""
    do = "one of these, with predicted step time and memory:\n" + _remedies(forecast, planned, device, wanted)
    return OutOfMemory(f"GPU memory is not enough on rank {rank}{asked}", why, do, code="out-of-gpu-memory")


def _remedies(forecast: Forecast, planned: RankMemory, device: DeviceMemory | None, wanted: float) -> str:
    """The first changes that make the plan smaller by what is missing, the error of the plan included."""
    _, need = fullest_rank(forecast)
    if device:
        missed = max(0.0, device.total - device.free + wanted - planned.total_gib)
        usable = USABLE * device.total - missed
    else:
        usable = USABLE * need
    found = remedies(forecast, min(usable, USABLE * need))[:SHOWN]
    lines = [f"  {place}. {remedy.describe()}" for place, remedy in enumerate(found, 1)]
    if not lines:
        lines = ["  use more GPUs, a larger --pipeline-model-parallel-size, or a shorter --seq-length"]
    if device and device.reserved - device.allocated > FRAGMENTED * device.total:
        lines.append("  or, since much of it is fragments: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    return "\n".join(lines)


def _wanted_gib(text: str) -> float:
    """What the allocation that failed asked for, by torch's message; 0 where it does not say."""
    found = re.search(r"Tried to allocate ([\d.]+) (KiB|MiB|GiB|bytes)", text)
    return float(found[1]) * UNITS[found[2]] / GIB if found else 0.0
