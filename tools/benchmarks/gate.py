"""Correctness before time: every arm is compared with float64 on its own inputs, and one that is wrong is not timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from mkd.losses import KDObjective, build_divergence
from mkd.losses.dense_reference import dense_kd

REFERENCE_BYTES = {"cuda": 2**28, "cpu": 2**23}  # one float64 chunk of logits


@dataclass(frozen=True)
class Errors:
    """|loss - reference| / |reference|, and the norm of the gradient's difference over the reference's norm."""

    loss: float
    gradient: float

    def within(self, bound: Errors) -> bool:
        """Not so for NaN."""
        return self.loss <= bound.loss and self.gradient <= bound.gradient


SAME_FUNCTION = Errors(loss=2e-2, gradient=1e-1)
"""What rounding to bf16 can explain, in logits (4e-2 of the gradient) and in log-probabilities; another loss is far off."""


def relative(value: Tensor, reference: Tensor) -> float:
    reference = reference.double()
    return (torch.linalg.vector_norm(value.double() - reference) / torch.linalg.vector_norm(reference)).item()


class GatedArm(Protocol):
    """What the gate needs to know about an arm."""

    name: str
    divergence: str
    is_ours: bool
    half: bool  # on half of the loss tokens
    run: Callable[[], tuple[Tensor, ...]]


class Case(Protocol):
    """The inputs of a benchmark, and what is right on them."""

    all_rows: Tensor  # [n] loss masks
    half_of_rows: Tensor

    def restore(self) -> None:
        """Undo what an arm has written over."""

    def reference(self, divergence: str, mask: Tensor) -> tuple[Tensor, ...]:
        """float64: the loss, and gradients."""

    def errors(self, result: tuple[Tensor, ...], reference: tuple[Tensor, ...]) -> Errors: ...


ArmType = TypeVar("ArmType", bound=GatedArm)


def by_reference(arms: Sequence[ArmType]) -> Iterator[tuple[bool, str, list[ArmType]]]:
    """(half, divergence, arms): the groups that share one float64 reference."""
    for half, divergence in sorted({(arm.half, arm.divergence) for arm in arms}):
        yield half, divergence, [arm for arm in arms if (arm.half, arm.divergence) == (half, divergence)]


def attempt(arm: GatedArm, notes: list[str]) -> tuple[Tensor, ...] | None:
    """The arm's result. Another project's code that fails on this machine gives a note and None; ours raises."""
    try:
        return arm.run()
    except Exception as error:
        if arm.is_ours:
            raise
        notes.append(
            f"{arm.name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}, skipped"
        )
        return None


def check(case: Case, arms: Sequence[GatedArm], notes: list[str]) -> dict[str, Errors]:
    """Errors of every arm that runs, against float64 on the case's own inputs."""
    errors = {}
    for half, divergence, group in by_reference(arms):
        reference = case.reference(divergence, case.half_of_rows if half else case.all_rows)
        for arm in group:
            case.restore()
            result = attempt(arm, notes)
            if result is not None:
                errors[arm.name] = case.errors(result, reference)
    return errors


def worst(errors: list[Errors]) -> Errors:
    """The largest of each; NaN if there is one."""
    tensor = torch.tensor([[e.loss, e.gradient] for e in errors], dtype=torch.float64)
    return Errors(*tensor.amax(dim=0).tolist())


def reference_chunks(rows: int, width: int, device: torch.device) -> list[slice]:
    """Slices over `rows` such that float64 [slice, width] has `REFERENCE_BYTES`."""
    height = max(1, REFERENCE_BYTES[device.type] // (8 * width))
    return [slice(first, min(first + height, rows)) for first in range(0, rows, height)]


def reference_rows(
    student_logits: Tensor,  # [n, v] any float dtype
    teacher_logits: Tensor,  # [n, v]
    loss_mask: Tensor,  # [n]
    divergence: str,
) -> tuple[Tensor, Tensor]:
    """Sum over rows of the divergence (T = 1, no cross entropy), and its gradient: float64 [], [n, v]."""
    student = student_logits.detach().double().requires_grad_()
    vocab = student.shape[1]
    labels = torch.zeros(
        student.shape[0], dtype=torch.int64, device=student.device
    )  # cross entropy is not part of it
    loss = dense_kd(
        student,
        teacher_logits,
        labels,
        loss_mask,
        KDObjective(vocab, vocab, kd_ratio=1.0, divergence=build_divergence(divergence)),
    ).loss
    (gradient,) = torch.autograd.grad(loss, student)
    return loss.detach(), gradient
