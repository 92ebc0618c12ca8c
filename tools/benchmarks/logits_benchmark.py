"""Benchmark losses on whole logits: mkd, eager torch, torch.compile, TRL, ModelOpt, NeMo Automodel, Liger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from mkd.losses import KDObjective, build_divergence, vocab_parallel_kd
from tools.benchmarks import peers
from tools.benchmarks.benchmark_report import Report, Requirement, Skipped, table
from tools.benchmarks.gate import (
    SAME_FUNCTION,
    Errors,
    check,
    reference_chunks,
    reference_rows,
    relative,
    worst,
)
from tools.benchmarks.machine import Machine, copy_bandwidth
from tools.benchmarks.measure import Arm, peak_bytes, time_arms

DIVERGENCES = ("forward_kl", "reverse_kl", "mixed_kl", "jsd")
FORWARD_KL = "mkd forward_kl"
HALF = "mkd forward_kl, 50% loss tokens"
EAGER = "F.kl_div fp32"
COMPILED = "torch.compile of F.kl_div"
EAGER_PEERS = ("TRL", "ModelOpt", "Automodel", "Automodel chunked")
GATE_ROWS = 256  # rows whose gradient is compared, spread over all


@dataclass(frozen=True)
class LogitsArm:
    """One implementation.

    `run` returns (mean loss over loss rows, gradient [n, v]) and may overwrite `student`.
    """

    name: str
    divergence: str
    run: Callable[[], tuple[Tensor, Tensor]]
    is_ours: bool = False
    half: bool = False  # half of the rows have loss


class LogitsCase:
    """Random logits of both models, KL about 0.5 apart."""

    def __init__(self, rows: int, vocab: int, machine: Machine):
        self.rows, self.vocab, self.machine = rows, vocab, machine
        generator = machine.generator()

        def normal(*size: int) -> Tensor:
            values = torch.empty(*size, device=machine.device, dtype=machine.dtype)
            return values.normal_(generator=generator)

        self.teacher = normal(self.rows, self.vocab).mul_(3)
        self.pristine = normal(self.rows, self.vocab).add_(self.teacher)
        self.student = torch.empty_like(self.pristine)  # read, and maybe overwritten, by the arms
        device = machine.device
        self.labels = torch.randint(self.vocab, (self.rows,), device=device, generator=generator)
        self.all_rows = torch.ones(self.rows, device=device)
        self.half_of_rows = torch.zeros(self.rows, device=device)
        self.half_of_rows[
            torch.randperm(self.rows, device=device, generator=generator)[: max(1, self.rows // 2)]
        ] = 1.0

    def restore(self) -> None:
        self.student.copy_(self.pristine)

    @property
    def unit(self) -> int:
        """Bytes of one model's logits, the unit u."""
        return self.pristine.nbytes

    @cached_property
    def gate_rows(self) -> Tensor:
        return torch.linspace(0, self.rows - 1, min(GATE_ROWS, self.rows), device=self.machine.device).long()

    def reference(self, divergence: str, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the mean loss, and its gradient on `gate_rows`, in float64."""
        count = mask.sum()
        losses = [
            reference_rows(self.pristine[rows], self.teacher[rows], mask[rows], divergence)[0]
            for rows in reference_chunks(self.rows, self.vocab, self.machine.device)
        ]
        gradients = [
            reference_rows(self.pristine[rows], self.teacher[rows], mask[rows], divergence)[1]
            for rows in self.gate_rows.split(max(1, len(self.gate_rows) // 8))
        ]
        return torch.stack(losses).sum() / count, torch.cat(gradients) / count

    def errors(self, result: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor]) -> Errors:
        loss, gradient = result
        return Errors(relative(loss, reference[0]), relative(gradient[self.gate_rows], reference[1]))


def mkd_loss(case: LogitsCase, divergence: str, mask: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    inverse_count = 1.0 / mask.sum()
    objective = KDObjective(case.vocab, case.vocab, kd_ratio=1.0, divergence=build_divergence(divergence))

    def run() -> tuple[Tensor, Tensor]:
        student = case.student.detach().requires_grad_()
        output = vocab_parallel_kd(
            student, case.teacher, case.labels, mask, objective, tp_group=None, overwrite_student_logits=True
        )
        loss = output.loss * inverse_count
        return loss.detach(), torch.autograd.grad(loss, student)[0]

    return run


def other_loss(case: LogitsCase, loss_function: peers.LogitsLoss) -> Callable[[], tuple[Tensor, Tensor]]:
    def run() -> tuple[Tensor, Tensor]:
        student = case.student.detach().requires_grad_()
        loss = loss_function(student, case.teacher, case.labels)
        return loss.detach(), torch.autograd.grad(loss, student)[0]

    return run


def eager_kl(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """Compute the KL the usual way: log-softmax of both models in fp32, then F.kl_div."""
    student, teacher = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
    return F.kl_div(student, teacher, reduction="sum", log_target=True) / labels.shape[0]


def eager_jsd(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    student, teacher = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
    mixture = torch.logaddexp(student, teacher) - 0.6931471805599453  # ln 2
    parts = [F.kl_div(mixture, one, reduction="sum", log_target=True) for one in (student, teacher)]
    return (parts[0] + parts[1]) / (2 * labels.shape[0])


def arms_of(case: LogitsCase) -> tuple[list[LogitsArm], list[str]]:
    """Return all arms that can run here, and notes on those that cannot."""
    arms = [
        LogitsArm(f"mkd {name}", name, mkd_loss(case, name, case.all_rows), is_ours=True)
        for name in DIVERGENCES
    ]
    arms.append(
        LogitsArm(
            HALF, "forward_kl", mkd_loss(case, "forward_kl", case.half_of_rows), is_ours=True, half=True
        )
    )
    arms.append(LogitsArm(EAGER, "forward_kl", other_loss(case, eager_kl)))
    arms.append(LogitsArm("F.kl_div JSD fp32", "jsd", other_loss(case, eager_jsd)))
    if case.machine.compile:
        arms.append(
            LogitsArm(COMPILED, "forward_kl", other_loss(case, torch.compile(eager_kl, dynamic=False)))
        )
        arms.append(
            LogitsArm(
                "torch.compile of JSD", "jsd", other_loss(case, torch.compile(eager_jsd, dynamic=False))
            )
        )
    loaders = {
        ("TRL", "forward_kl"): lambda: peers.trl_jsd(0.0),
        ("TRL JSD", "jsd"): lambda: peers.trl_jsd(0.5),
        ("ModelOpt", "forward_kl"): peers.modelopt_kl,
        ("Automodel", "forward_kl"): peers.automodel_kd,
        ("Automodel chunked", "forward_kl"): lambda: peers.automodel_kd(chunk_size=1024),
        ("Liger KLDIV", "forward_kl"): peers.liger_kl,
        ("Liger JSD", "jsd"): lambda: peers.liger_jsd(0.5),
    }
    found, notes = peers.find(loaders)
    arms += [
        LogitsArm(name, divergence, other_loss(case, loss)) for (name, divergence), loss in found.items()
    ]
    return arms, notes


def fp32_error(machine: Machine, vocab: int, rows: int = 64) -> Errors:
    """Check mkd's losses on fp32 logits too; return the worst error of all divergences."""
    case = LogitsCase(rows, vocab, replace(machine, dtype=torch.float32))
    arms = [LogitsArm(name, name, mkd_loss(case, name, case.all_rows), is_ours=True) for name in DIVERGENCES]
    return worst(list(check(case, arms, []).values()))


def benchmark(machine: Machine, rows: int, vocab: int) -> Report:
    """Check all arms against float64, measure their time and memory at one shape, and print the table."""
    case = LogitsCase(rows, vocab, machine)
    arms, notes = arms_of(case)
    errors = check(case, arms, notes)
    arms = [arm for arm in arms if arm.name in errors]
    right = [arm for arm in arms if errors[arm.name].within(SAME_FUNCTION)]
    timed = [Arm(arm.name, arm.run, case.restore) for arm in right]
    times = time_arms(timed, machine.device, machine.rounds)
    peaks = {arm.name: peak_bytes(arm, machine.device) / case.unit for arm in timed}
    bandwidth = copy_bandwidth(machine)
    limit = 5000 * case.unit / bandwidth
    shape = f"{rows}x{vocab}"
    title = f"logits {shape}, u = {case.unit / 2**20:.0f} MiB, "
    title += f"copy {bandwidth / 1e9:.0f} GB/s, 5u = {limit:.3g} ms"
    header = ["forward + backward", "ms", "x ours", "peak/u", "loss err", "grad err"]
    print(table(title, header, [_row(arm, times, peaks, errors[arm.name]) for arm in arms]), *notes, sep="\n")
    ours = {arm.name: errors[arm.name] for arm in arms if arm.is_ours}
    wrong = [f"{name} at {shape}" for name, error in ours.items() if not error.within(SAME_FUNCTION)]
    requirements = accuracy(machine, vocab, worst(list(ours.values())), shape)
    if not wrong:
        requirements += (
            gpu_speed(times, peaks, limit, shape) if machine.is_cuda else cpu_speed(times, peaks, shape)
        )
    return Report(requirements, wrong, {shape: times})


def _row(arm: LogitsArm, times: dict, peaks: dict, error: Errors) -> list[str]:
    measured = ["wrong: not timed", "", ""]
    if arm.name in times:
        ratio = times[arm.name] / times.get(FORWARD_KL, float("nan"))
        measured = [f"{times[arm.name]:.3f}", f"{ratio:.2f}", f"{peaks[arm.name]:.3f}"]
    return [arm.name, *measured, f"{error.loss:.1e}", f"{error.gradient:.1e}"]


def accuracy(machine: Machine, vocab: int, stored: Errors, shape: str) -> list[Requirement]:
    fp32 = fp32_error(machine, vocab)
    bound = 1e-5 if machine.dtype == torch.float32 else 4e-3
    return [
        Requirement("R8", stored.loss, f"worst loss error, {shape}", "<=", 1e-5),
        Requirement(
            "R8", stored.gradient, f"worst {str(machine.dtype)[6:]} gradient error, {shape}", "<=", bound
        ),
        Requirement("R8", fp32.gradient, f"worst fp32 gradient error, 64x{vocab}", "<=", 1e-5),
    ]


def gpu_speed(times: dict, peaks: dict, limit_ms: float, shape: str) -> list[Requirement | Skipped]:
    forward = times[FORWARD_KL]
    lines = [Requirement("R1", limit_ms / forward, f"of copy bandwidth, {shape}", ">=", 0.80)]
    for name, bound in (("reverse_kl", 1.15), ("mixed_kl", 1.15), ("jsd", 1.6)):
        lines.append(
            Requirement("R2", times[f"mkd {name}"] / forward, f"{name} over forward_kl, {shape}", "<=", bound)
        )
    eager = [times[name] for name in EAGER_PEERS if name in times]
    lines.append(
        Requirement("R3", min(eager) / forward, f"times the speed of the best eager peer, {shape}", ">=", 5)
        if eager
        else Skipped("R3", "no eager peer was timed")
    )
    lines.append(
        Requirement("R3", times[COMPILED] / forward, f"times the speed of torch.compile, {shape}", ">=", 2)
        if COMPILED in times
        else Skipped("R3", "torch.compile was not timed")
    )
    lines.append(Requirement("R4", peaks[FORWARD_KL], f"u of extra peak memory, {shape}", "<=", 0.02))
    return lines


def cpu_speed(times: dict, peaks: dict, shape: str) -> list[Requirement]:
    return [
        Requirement("R12", times[FORWARD_KL] / times[EAGER], f"of eager time, {shape}", "<=", 1.0),
        Requirement("R12", peaks[FORWARD_KL] / peaks[EAGER], f"of eager peak memory, {shape}", "<=", 0.5),
    ]
