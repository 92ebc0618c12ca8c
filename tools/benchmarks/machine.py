"""The device under test, and the two rates that bound everything on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tools.benchmarks.benchmark_report import Report, table
from tools.benchmarks.measure import Arm, time_arms

COPY_BYTES = {"cuda": 4 * 2**30, "cpu": 64 * 2**20}  # far beyond any cache
GEMM_SIZE = {"cuda": 8192, "cpu": 512}


@dataclass(frozen=True)
class Machine:
    """Device and settings of a benchmark."""

    device: torch.device
    dtype: torch.dtype  # dtype of activations and logits
    rounds: int  # timed calls of each arm
    seed: int
    compile: bool  # also time torch.compile of the plain losses (needs a compiler)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed)

    @property
    def name(self) -> str:
        """Name of the GPU, or `CPU, N threads`."""
        if self.is_cuda:
            return torch.cuda.get_device_name(self.device)
        return f"CPU, {torch.get_num_threads()} threads"

    def describe(self) -> str:
        versions = f"torch {torch.__version__}, {str(self.dtype)[6:]}"
        return f"{self.name}, {versions}, {self.rounds} rounds, seed {self.seed}"


def copy_bandwidth(machine: Machine) -> float:
    """Measure bytes per second of a large copy on the device, counting bytes read and written."""
    source = torch.empty(COPY_BYTES[machine.device.type] // 4, device=machine.device).normal_(
        generator=machine.generator()
    )
    target = torch.empty_like(source)
    arm = Arm("copy", lambda: target.copy_(source))
    milliseconds = time_arms([arm], machine.device, machine.rounds)["copy"]
    return 2 * source.nbytes / (milliseconds / 1000)


def gemm_rate(machine: Machine) -> float:
    """Measure FLOPs per second of a large square matrix product of random data, in the machine's dtype."""
    size = GEMM_SIZE[machine.device.type]
    a, b = (
        torch.empty(size, size, device=machine.device)
        .normal_(generator=machine.generator())
        .to(machine.dtype)
        for _ in range(2)
    )
    arm = Arm("gemm", lambda: a @ b)
    milliseconds = time_arms([arm], machine.device, machine.rounds)["gemm"]
    return 2 * size**3 / (milliseconds / 1000)


def ceilings(machine: Machine) -> Report:
    """Print copy bandwidth and matrix-product rate, each measured twice to show the machine's noise."""
    measured = [(copy_bandwidth(machine) / 1e9, gemm_rate(machine) / 1e12) for _ in range(2)]
    rows = [
        ["copy, GB/s (read + written)", *(f"{bandwidth:.1f}" for bandwidth, _ in measured)],
        [f"{str(machine.dtype)[6:]} GEMM, TFLOP/s", *(f"{rate:.3g}" for _, rate in measured)],
    ]
    print(table("ceilings", ["", "first", "second"], rows))
    return Report([])
