"""Benchmark the loss with the LM heads in it.

The arms: mkd, the bare matrix products, Liger, TRL, and heads that keep their logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tools.benchmarks import peers
from tools.benchmarks.benchmark_report import Report, Requirement, Skipped, table
from tools.benchmarks.gate import SAME_FUNCTION, Errors, check
from tools.benchmarks.head_case import Gradients, HeadCase, HeadShape, block_rows_of, mkd_head
from tools.benchmarks.logits_benchmark import eager_kl
from tools.benchmarks.machine import Machine
from tools.benchmarks.measure import Arm, peak_bytes, time_arms

FORWARD_KL, JSD = "mkd forward_kl", "mkd jsd"
HALF = "mkd forward_kl, 50% loss tokens"
FP32 = "mkd forward_kl, fp32 logits"
GEMMS = "bare GEMMs"
LIGER_CHUNKED, TRL_CHUNKED = "Liger chunked", "TRL chunked"
LIGER_CHUNKS = (1024, 2048, 4096)


@dataclass(frozen=True)
class HeadArm:
    """One implementation; `run` returns the loss and both gradients."""

    name: str
    divergence: str
    run: Callable[[], Gradients]
    is_ours: bool = False
    half: bool = False


def gemms(case: HeadCase) -> Callable[[], None]:
    """Return a call of the four matrix products that a fused head needs, over all rows.

    dW accumulates in fp32.
    """
    shape = case.shape
    logits_gradient = torch.empty(
        shape.rows, shape.vocab, device=case.machine.device, dtype=case.machine.dtype
    )
    logits_gradient.normal_(generator=case.machine.generator())

    def run() -> None:
        case.teacher_hidden @ case.teacher_weight.t()
        case.student_hidden @ case.student_weight.t()
        logits_gradient @ case.student_weight
        if case.machine.is_cuda and case.machine.dtype == torch.bfloat16:
            torch.addmm(
                case.main_grad,
                logits_gradient.t(),
                case.student_hidden,
                out_dtype=torch.float32,
                out=case.main_grad,
            )
        else:
            case.main_grad.addmm_(logits_gradient.t().float(), case.student_hidden.float())

    return run


def trl_head(case: HeadCase, divergence: Callable, beta: float) -> Callable[[], Gradients]:
    def run() -> Gradients:
        hidden, weight = _leaves(case)
        values, _ = divergence(
            hidden, weight, None, case.teacher_hidden, case.teacher_weight, None, beta, 1.0
        )
        return _backward(values.mean(), hidden, weight)

    return run


def liger_head(case: HeadCase, loss_function: Callable) -> Callable[[], Gradients]:
    def run() -> Gradients:
        hidden, weight = _leaves(case)
        loss = loss_function(hidden, weight, case.teacher_hidden, case.teacher_weight, case.labels)
        return _backward(loss, hidden, weight)

    return run


def materialised_head(case: HeadCase, loss_function: peers.LogitsLoss) -> Callable[[], Gradients]:
    def run() -> Gradients:
        hidden, weight = _leaves(case)
        teacher = case.teacher_hidden @ case.teacher_weight.t()
        return _backward(loss_function(hidden @ weight.t(), teacher, case.labels), hidden, weight)

    return run


def _leaves(case: HeadCase) -> tuple[Tensor, Tensor]:
    return case.student_hidden.detach().requires_grad_(), nn.Parameter(case.student_weight)


def _backward(loss: Tensor, hidden: Tensor, weight: Tensor) -> Gradients:
    return (loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))


def arms_of(case: HeadCase, block_rows: int | None) -> tuple[list[HeadArm], list[str]]:
    """Return all arms that can run here, and notes on those that cannot."""
    arms = [
        HeadArm(
            FORWARD_KL, "forward_kl", mkd_head(case, "forward_kl", case.all_rows, block_rows), is_ours=True
        ),
        HeadArm(JSD, "jsd", mkd_head(case, "jsd", case.all_rows, block_rows), is_ours=True),
        HeadArm(
            HALF,
            "forward_kl",
            mkd_head(case, "forward_kl", case.half_of_rows, block_rows),
            is_ours=True,
            half=True,
        ),
        HeadArm(
            FP32,
            "forward_kl",
            mkd_head(case, "forward_kl", case.all_rows, block_rows, fp32_logits=True),
            is_ours=True,
        ),
        HeadArm("logits kept, F.kl_div fp32", "forward_kl", materialised_head(case, eager_kl)),
    ]
    loaders = {
        ("logits kept, TRL", "forward_kl"): lambda: materialised_head(case, peers.trl_jsd(0.0)),
        ("logits kept, ModelOpt", "forward_kl"): lambda: materialised_head(case, peers.modelopt_kl()),
        ("logits kept, Automodel", "forward_kl"): lambda: materialised_head(case, peers.automodel_kd()),
        (TRL_CHUNKED, "forward_kl"): lambda: trl_head(case, peers.trl_chunked(), 0.0),
        (f"{TRL_CHUNKED} JSD", "jsd"): lambda: trl_head(case, peers.trl_chunked(), 0.5),
        ("Liger FusedLinearJSD", "forward_kl"): lambda: liger_head(case, peers.liger_fused_jsd(0.0)),
    }
    for size in (chunk for chunk in LIGER_CHUNKS if chunk <= max(case.shape.rows, LIGER_CHUNKS[0])):
        for divergence, beta, label in (
            ("forward_kl", 0.0, LIGER_CHUNKED),
            ("jsd", 0.5, f"{LIGER_CHUNKED} JSD"),
        ):
            loaders[f"{label} {size}", divergence] = lambda beta=beta, size=size: liger_head(
                case, peers.liger_chunked_jsd(beta, size)
            )
    found, notes = peers.find(loaders)
    return arms + [HeadArm(name, divergence, run) for (name, divergence), run in found.items()], notes


def benchmark(machine: Machine, shape: HeadShape, block_rows: int | None = None) -> Report:
    """Check all arms against float64, measure their time and memory at one shape, and print the table."""
    case = HeadCase(shape, machine)
    arms, notes = arms_of(case, block_rows)
    block_rows = block_rows_of(machine, shape, block_rows)
    errors = check(case, arms, notes)
    arms = [arm for arm in arms if arm.name in errors]
    right = [arm for arm in arms if errors[arm.name].within(SAME_FUNCTION)]
    timed = [Arm(arm.name, arm.run, case.restore) for arm in right] + [Arm(GEMMS, gemms(case), case.restore)]
    times = time_arms(timed, machine.device, machine.rounds)
    peaks = {arm.name: peak_bytes(arm, machine.device) for arm in timed}
    rows = [[GEMMS, f"{times[GEMMS]:.3f}", "1.00", f"{peaks[GEMMS] / 2**20:.0f}", "", ""]]
    rows += [_row(arm, times, peaks, errors[arm.name]) for arm in arms]
    header = ["forward + backward", "ms", "x GEMMs", "peak MiB", "loss err", "grad err"]
    print(table(f"head {shape} (N,h_s,h_t,V), chunks of {block_rows} rows", header, rows), *notes, sep="\n")
    wrong = [f"{arm.name} at {shape}" for arm in arms if arm.is_ours and arm not in right]
    if wrong:
        return Report([], wrong)
    requirements = [_memory(case, peaks, block_rows), *_speed(times, shape)] if machine.is_cuda else []
    requirements.append(
        Requirement(
            "R6",
            times[HALF] / times[FORWARD_KL],
            f"of the head's time at 50% loss tokens, {shape}",
            "<=",
            0.58,
        )
    )
    return Report(requirements, times={str(shape): times})


def _row(arm: HeadArm, times: dict, peaks: dict, error: Errors) -> list[str]:
    measured = ["wrong: not timed", "", ""]
    if arm.name in times:
        ratio = times[arm.name] / times[GEMMS]
        measured = [f"{times[arm.name]:.3f}", f"{ratio:.2f}", f"{peaks[arm.name] / 2**20:.0f}"]
    return [arm.name, *measured, f"{error.loss:.1e}", f"{error.gradient:.1e}"]


def _memory(case: HeadCase, peaks: dict, block_rows: int) -> Requirement:
    """Compare the extra peak memory with both models' logits of one block."""
    blocks = 2 * min(block_rows, case.shape.rows) * case.shape.vocab * case.machine.dtype.itemsize
    what = f"of two chunks of logits as extra peak memory of the head, {case.shape}"
    return Requirement("R4", peaks[FORWARD_KL] / blocks, what, "<=", 1.05)


def _speed(times: dict, shape: HeadShape) -> list[Requirement | Skipped]:
    lines: list[Requirement | Skipped] = [
        Requirement("R5", times[FORWARD_KL] / times[GEMMS], f"of the bare GEMMs' time, {shape}", "<=", 1.15)
    ]
    for peer, bound in ((LIGER_CHUNKED, 1.10), (TRL_CHUNKED, 1.5)):
        for label, ours in ((peer, FORWARD_KL), (f"{peer} JSD", JSD)):
            found = [
                times[name] for name in times if name == label or name.removeprefix(label + " ").isdigit()
            ]
            if found:
                ratio = min(found) / times[ours]
                lines.append(
                    Requirement("R5", ratio, f"times the speed of {label} at its best, {shape}", ">=", bound)
                )
            else:
                lines.append(Skipped("R5", f"{label} was not timed"))
    return lines
