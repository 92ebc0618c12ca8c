"""The machine: CUDA with NCCL and, if installed, Transformer Engine; or CPU cores with gloo.

__init__.py            `Platform`, `detect` and the settings that must come before the first CUDA call
megatron_versions.py   what differs between versions of megatron-core
cpu.py                 Megatron-core without a GPU: the only replaced attributes of other libraries
fp8_support.py         FP8 products on this machine
host_memory.py         page-locked host memory, and many tensors in one buffer
processes.py           unique process ids, and whether a process is alive
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from dataclasses import dataclass

import torch

from mkd.busy_machine import is_busy
from mkd.human import counted
from mkd.platform.megatron_versions import quiet_newer_versions


@dataclass(frozen=True)
class Platform:
    """The compute device of this process and the optional libraries that it can use."""

    device: torch.device
    backend: str  # torch.distributed backend
    transformer_engine: bool
    apex: bool

    @property
    def is_cuda(self) -> bool:
        """True if the device is a GPU."""
        return self.device.type == "cuda"

    def describe(self) -> str:
        """Return one line for the start of a run: the device, and what each absent library costs."""
        if not self.is_cuda:
            threads = torch.get_num_threads()
            line = f"CPU platform: {self.backend}, local layer spec, {counted(threads, 'thread')} a process"
            slow = threads > 1 and is_busy()  # a run keeps its threads: their number may change last bits
            return f"{line}; on this busy machine OMP_NUM_THREADS=1 is faster" if slow else line
        local = "local spec (no Transformer Engine: slower)"
        spec = "Transformer Engine spec" if self.transformer_engine else local
        notes = [f"{torch.cuda.get_device_name(self.device)}: {self.backend}", spec]
        if self.apex:
            notes.append("apex")
        elif not self.transformer_engine:
            notes.append("no apex (weight gradients accumulate in a pass of their own: slower)")
        return ", ".join(notes)


def local_rank() -> int:
    """Return the index of this process on its machine, as torchrun sets it; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def processes_of_machine(world_size: int) -> int:
    """Return how many of the `world_size` processes run on this machine, by torchrun's environment."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def gpu_gib() -> float | None:
    """Return the memory of this process's GPU in GiB; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    device = local_rank() % torch.cuda.device_count()
    return torch.cuda.get_device_properties(device).total_memory / 2**30


def usable_cores() -> int:
    """Return how many CPU cores this process may use; on macOS, the machine's cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def detect() -> Platform:
    """Return the platform of this machine. Without a GPU, install the CPU shim for megatron-core first."""
    _quiet_remarks()
    if torch.cuda.is_available():
        # With TF32, Transformer Engine's fp32 products would keep 10 bits of fraction.
        os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
        device = torch.device("cuda", local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
        libraries = has_transformer_engine(), _importable("apex.optimizers")
        return Platform(device, "nccl", *libraries)
    from mkd.platform import cpu

    cpu.install()
    return Platform(torch.device("cpu"), "gloo", transformer_engine=False, apex=False)


def prepare_for_files() -> None:
    """Prepare like `detect`, without a GPU: for programs that only read and write Megatron's files."""
    if torch.cuda.is_available():
        _quiet_remarks()
    else:
        detect()


def make_deterministic() -> None:
    """Select kernels of torch, cuBLAS, NCCL and Transformer Engine that give the same bits in every run.

    Call it before the first CUDA call, because the libraries read these variables when they start.
    """
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    os.environ["NCCL_ALGO"] = "Ring"
    torch.use_deterministic_algorithms(True, warn_only=True)


def has_transformer_engine() -> bool:
    """Return True if Transformer Engine for torch is installed."""
    return _importable("transformer_engine.pytorch")


def _importable(module: str) -> bool:
    """Return True if `module` is installed (PyPI's unrelated `apex` has no `apex.optimizers`)."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _quiet_remarks() -> None:
    """Silence warnings of Megatron's imports and checkpoints that every rank of every run would repeat.

    `Platform.describe` reports once which libraries are missing and what that costs.
    """
    quiet_newer_versions()
    messages = [".*(Apex|Transformer Engine).* not installed"]
    messages.append("full scope is deprecated")  # Megatron warns about its own default
    messages += [] if torch.cuda.is_available() else [".*CUDA_DEVICE_MAX_CONNECTIONS"]
    for message in messages:
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
    modules = r"megatron\.|mkd\.platform|torch\.distributed"
    warnings.filterwarnings("ignore", category=FutureWarning, module=modules)
