"""Benchmark `DistillationLoss`, the loss as a library, beside Liger, TRL and torch.compile.

Parameters are plain and in the machine's dtype, as a trainer has them: unlike in `head_benchmark.py` no fp32
buffer of gradients exists before the call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from mkd.losses import DistillationLoss
from tools.benchmarks import peers
from tools.benchmarks.benchmark_report import Report, table
from tools.benchmarks.gate import SAME_FUNCTION, check
from tools.benchmarks.head_benchmark import HeadArm, liger_head, materialised_head, trl_head
from tools.benchmarks.head_case import Gradients, HeadCase, HeadShape
from tools.benchmarks.logits_benchmark import eager_jsd, eager_kl
from tools.benchmarks.machine import Machine
from tools.benchmarks.measure import Arm, peak_bytes, time_arms
from tools.benchmarks.results import Other

SMALL_BLOCK = 1024  # rows
LIGER_CHUNKS = (1024, 4096)


def library_loss(case: HeadCase, divergence: str, **settings) -> Callable[[], Gradients]:
    """Return a call of the module, mean over all rows."""
    loss = DistillationLoss(divergence, kd_ratio=1.0, **settings)
    parameter = nn.Parameter(case.student_weight)

    def run() -> Gradients:
        hidden = case.student_hidden.detach().requires_grad_()
        heads = dict(student_head=parameter, teacher_head=case.teacher_weight)
        value = loss(hidden, case.teacher_hidden, shift_labels=case.labels, **heads).loss
        value = value.mean() if settings.get("reduction") == "none" else value
        return (value.detach(), *torch.autograd.grad(value, (hidden, parameter)))

    return run


def arms_of(case: HeadCase) -> tuple[list[HeadArm], list[str]]:
    """Return all arms that can run here, and notes on those that cannot."""
    block = min(SMALL_BLOCK, case.shape.rows)
    variants = {
        "": {},
        f", blocks of {block}": dict(block_rows=block),
        ", fp32 logits": dict(fp32_logits=True),
        ", a value a row": dict(reduction="none"),
    }
    arms = [
        HeadArm(f"mkd forward_kl{label}", "forward_kl", library_loss(case, "forward_kl", **given), True)
        for label, given in variants.items()
    ]
    for label, given in list(variants.items())[:2]:
        arms.append(HeadArm(f"mkd jsd{label}", "jsd", library_loss(case, "jsd", **given), True))
    for divergence, beta, plain in (("forward_kl", 0.0, eager_kl), ("jsd", 0.5, eager_jsd)):
        arms.append(HeadArm(f"eager torch {divergence}", divergence, materialised_head(case, plain)))
        if case.machine.compile:
            compiled = torch.compile(plain, dynamic=False)
            arms.append(HeadArm(f"torch.compile {divergence}", divergence, materialised_head(case, compiled)))
        loaders: dict[str, Callable[[], Callable[[], Gradients]]] = {
            "TRL chunked": lambda beta=beta: trl_head(case, peers.trl_chunked(), beta),
            "TRL GKD, logits kept": lambda beta=beta: materialised_head(case, peers.trl_jsd(beta)),
            "Liger fused": lambda beta=beta: liger_head(case, peers.liger_fused_jsd(beta)),
        }
        for size in LIGER_CHUNKS:
            loaders[f"Liger chunked {size}"] = lambda beta=beta, size=size: liger_head(
                case, peers.liger_chunked_jsd(beta, size)
            )
        found, notes = peers.find(loaders)
        arms += [HeadArm(f"{name} {divergence}", divergence, run) for name, run in found.items()]
    return arms, notes


def benchmark(machine: Machine, shape: HeadShape) -> Report:
    """Check all arms against float64, measure their time and peak memory, and print the table."""
    case = HeadCase(shape, machine)
    case.main_grad = torch.empty(0, device=machine.device)  # no arm accumulates in it
    arms, notes = arms_of(case)
    errors = check(case, arms, notes)
    timed = [
        Arm(arm.name, arm.run)
        for arm in arms
        if arm.name in errors and errors[arm.name].within(SAME_FUNCTION)
    ]
    times = time_arms(timed, machine.device, machine.rounds)
    peaks = {arm.name: peak_bytes(arm, machine.device) for arm in timed}
    rows = []
    for arm in arms:
        if arm.name in errors:
            known = arm.name in times
            measured = (
                [f"{times[arm.name]:.3f}", f"{peaks[arm.name] / 2**20:.0f}"] if known else ["wrong", ""]
            )
            error = errors[arm.name]
            rows.append([arm.name, *measured, f"{error.loss:.1e}", f"{error.gradient:.1e}"])
    header = ["forward + backward", "ms", "peak MiB", "loss err", "grad err"]
    print(table(f"loss as a library {shape} (N,h_s,h_t,V)", header, rows), *notes, sep="\n")
    others = [Other(str(shape), name, "peak", "GiB", peak / 2**30) for name, peak in peaks.items()]
    wrong = [f"{arm.name} at {shape}" for arm in arms if arm.is_ours and arm.name not in times]
    return Report([], wrong, {str(shape): times}, others)
