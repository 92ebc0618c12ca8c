"""Time of a step on the device by kind of kernel, from torch's profiler."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

ALL_TO_ALL = "all-to-all"
KINDS = (  # the first that matches; a pipeline's messages would count as all-to-all
    (ALL_TO_ALL, r"nccl\w*(SendRecv|AlltoAll)|gloo:all_?to_?all"),
    ("other collectives", r"nccl|gloo:"),
    ("mixers", r"delta_rule|_w_u_|chunk_(fwd|bwd)_kernel|wy_repr|local_cumsum|l2norm|norm_gated|conv1d"),
    ("attention", r"fmha|flash|attention|sdpa"),
    ("products", r"gemm|nvjet|cutlass|xmma|_mm\b|::mm|addmm"),
    ("optimizer", r"multi_tensor|adam"),
    ("copies", r"memcpy|memset|copy|CatArray"),
)
REST = "other kernels"


@dataclass(frozen=True)
class KernelTimes:
    """Milliseconds on the device in one step of this rank, added up over kernels."""

    by_kind: dict[str, float]
    by_name: dict[str, tuple[float, int]]  # longest first; ms and calls
    busy_ms: float  # time in which at least one runs

    @property
    def total_ms(self) -> float:
        """Time of all kernels; above the step's if streams overlap."""
        return sum(self.by_kind.values())


def kernel_times(step: Callable[[], object], is_cuda: bool) -> KernelTimes:
    """Profile one step. On a CPU the events are torch's and gloo's, counted with what they call."""
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        step()
        if is_cuda:
            torch.cuda.synchronize()
    device = DeviceType.CUDA if is_cuda else DeviceType.CPU
    milliseconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    spans = []
    for event in profiled.events():
        if event.device_type == device and not (is_cuda and event.is_user_annotation):
            milliseconds[event.name] += event.time_range.elapsed_us() / 1000
            calls[event.name] += 1
            spans.append((event.time_range.start, event.time_range.end))
    by_kind: Counter[str] = Counter()
    for name, spent in milliseconds.items():
        by_kind[kind_of(name)] += spent
    by_name = {name: (spent, calls[name]) for name, spent in milliseconds.most_common()}
    return KernelTimes(dict(by_kind), by_name, covered(spans) / 1000)


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the length that spans (begin, end) cover together."""
    covered, latest = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, latest))
        latest = max(latest, end)
    return covered


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel, by its name."""
    for kind, pattern in KINDS:
        if re.search(pattern, kernel, re.IGNORECASE):
            return kind
    return REST
