"""Triton's configurations of fla's kernels: compile them in parallel, or try few of them.

Triton times every configuration of a kernel when it first runs, and compiles each one before, one after
another. That takes minutes. Processes that divide the configurations leave them in Triton's cache.

python -m tools.benchmarks.kernel_tuning --workers 12 --tokens 8192 --heads 16,32,128,128 16,16,128,128
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tools.benchmarks.mixer_case import OPERATIONS, MixerCase, gradients


@contextmanager
def part_of_configurations(index: int, parts: int | None) -> Iterator[None]:
    """Let kernels choose among every `parts`-th configuration from `index` on; None: the first one alone."""
    from mkd.models.mixers.fused_recurrence import kernels

    kernels()
    tuners = [one for one in gc.get_objects() if type(one).__name__ in ("Autotuner", "CachedAutotuner")]
    before = [one.configs for one in tuners]
    for one in tuners:
        one.configs = (one.configs[index::parts] if parts else []) or one.configs[:1]
    try:
        yield
    finally:
        for one, configs in zip(tuners, before, strict=True):
            one.configs = configs


def run_all(case: MixerCase, device: torch.device, dtype: torch.dtype) -> None:
    """Run forward and backward of all operations once."""
    from mkd.models.mixers.fused_recurrence import FusedRecurrence

    rows, inputs = case.rows(device), case.inputs(device, dtype, seed=1)
    for name in OPERATIONS:
        gradients(FusedRecurrence(), name, inputs, rows, dtype)


def case_of(tokens: int, heads: str) -> MixerCase:
    """Return a pack of short documents; `heads` are key heads, heads, and the channels of each."""
    return MixerCase((512,) * (tokens // 512), 0, *map(int, heads.split(",")))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", nargs="+", default=["16,32,128,128"])
    parser.add_argument("--index", type=int, help="number of this process; by default it starts all of them")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    if args.index is None:
        command = [sys.executable, "-m", "tools.benchmarks.kernel_tuning", *argv, "--index"]
        workers = [subprocess.Popen([*command, str(index)]) for index in range(args.workers)]
        codes = [one.wait() for one in workers]
        print(f"kernels compiled in {time.perf_counter() - start:.0f} s, exit codes {set(codes)}", flush=True)
        return
    from mkd.platform import detect

    device = detect().device
    with part_of_configurations(args.index, args.workers):
        for heads in args.heads:
            run_all(case_of(args.tokens, heads), device, torch.bfloat16)


if __name__ == "__main__":
    main(sys.argv[1:])
