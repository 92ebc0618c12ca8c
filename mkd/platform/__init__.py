"""What the machine offers: CUDA with NCCL and, where installed, Transformer Engine; or CPU cores with gloo."""

from __future__ import annotations

import importlib.util
import os
import warnings
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Platform:
    """The compute device of this process and the optional libraries that it can use."""

    device: torch.device
    backend: str  # torch.distributed backend
    transformer_engine: bool
    apex: bool

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def describe(self) -> str:
        """One line for the start of a run: the device, and what each absent library costs."""
        if not self.is_cuda:
            return (
                f"CPU platform: {self.backend}, local layer spec, {torch.get_num_threads()} threads a process"
            )
        notes = [f"{torch.cuda.get_device_name(self.device)}: {self.backend}"]
        notes.append(
            "Transformer Engine spec"
            if self.transformer_engine
            else "local spec (no Transformer Engine: slower)"
        )
        if self.apex:
            notes.append("apex")
        elif not self.transformer_engine:
            notes.append("no apex (weight gradients accumulate in a pass of their own: slower)")
        return ", ".join(notes)


def local_rank() -> int:
    """The index of this process on its machine, as torchrun sets it; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def usable_cores() -> int:
    """CPU cores that this process may use; those of the machine where the system does not say (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def detect() -> Platform:
    """Look at the machine once. On a machine without a GPU this installs the CPU shim for megatron-core."""
    _quiet_remarks()
    if torch.cuda.is_available():
        os.environ.setdefault(
            "NVIDIA_TF32_OVERRIDE", "0"
        )  # else Transformer Engine's fp32 products keep 10 bits of fraction
        device = torch.device("cuda", local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return Platform(
            device, "nccl", _importable("transformer_engine.pytorch"), _importable("apex.optimizers")
        )
    from mkd.platform import cpu

    cpu.install()
    return Platform(torch.device("cpu"), "gloo", transformer_engine=False, apex=False)


def prepare_for_files() -> None:
    """As `detect`, but take no GPU: for programs that read and write Megatron's files, before they import it."""
    if torch.cuda.is_available():
        _quiet_remarks()
    else:
        detect()


def make_deterministic() -> None:
    """Ask torch, cuBLAS, NCCL and Transformer Engine for kernels that give the same bits in every run.

    Before the first CUDA call: the libraries read these variables when they start.
    """
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    os.environ["NCCL_ALGO"] = "Ring"
    torch.use_deterministic_algorithms(True, warn_only=True)


def _importable(module: str) -> bool:
    """Whether `module` is installed (PyPI's unrelated `apex` has no `apex.optimizers`)."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _quiet_remarks() -> None:
    """Drop remarks of Megatron's imports and checkpoints that every run would repeat on every rank.

    What is missing and what that costs is said once, by `Platform.describe`.
    """
    warnings.filterwarnings(
        "ignore", message=".*(Apex|Transformer Engine).* not installed", category=UserWarning
    )
    warnings.filterwarnings(
        "ignore", message="full scope is deprecated", category=UserWarning
    )  # Megatron's own default
    if not torch.cuda.is_available():
        warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS", category=UserWarning)
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module=r"megatron\.|mkd\.platform|torch\.distributed"
    )
