"""Gate before timing: each arm is compared with float64 on its own inputs, and never timed if it is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from mkd.losses import KDObjective, build_divergence
from mkd.losses.dense_reference import dense_kd

REFERENCE_BYTES = {"cuda": 2**28, "cpu": 2**23}  # one float64 block of logits


@dataclass(frozen=True)
class Errors:
    """Relative errors of a loss and its gradient.

    |loss - reference| / |reference|, and the norm of the gradient's difference / the gradient's norm.
    """

    loss: float
    gradient: float

    def within(self, bound: Errors) -> bool:
        """Return True if both errors are within `bound`; False for NaN."""
        return self.loss <= bound.loss and self.gradient <= bound.gradient


SAME_FUNCTION = Errors(loss=2e-2, gradient=1e-1)
"""Errors that rounding to bf16 explains, in logits (4e-2 of the gradient) and log-probabilities.

A different loss is far off.
"""


def relative(value: Tensor, reference: Tensor) -> float:
    reference = reference.double()
    return (torch.linalg.vector_norm(value.double() - reference) / torch.linalg.vector_norm(reference)).item()


class GatedArm(Protocol):
    """Part of an arm that the gate reads."""

    name: str
    divergence: str
    is_ours: bool
    half: bool  # half of the rows have loss
    run: Callable[[], tuple[Tensor, ...]]


class Case(Protocol):
    """Inputs of a benchmark, and the right results on them."""

    all_rows: Tensor  # [n] loss masks
    half_of_rows: Tensor

    def restore(self) -> None:
        """Restore what an arm has overwritten."""

    def reference(self, divergence: str, mask: Tensor) -> tuple[Tensor, ...]:
        """Compute the loss and the gradients in float64."""

    def errors(self, result: tuple[Tensor, ...], reference: tuple[Tensor, ...]) -> Errors: ...


ArmType = TypeVar("ArmType", bound=GatedArm)


def by_reference(arms: Sequence[ArmType]) -> Iterator[tuple[bool, str, list[ArmType]]]:
    """Yield (half, divergence, arms): the groups that share one float64 reference."""
    for half, divergence in sorted({(arm.half, arm.divergence) for arm in arms}):
        yield half, divergence, [arm for arm in arms if (arm.half, arm.divergence) == (half, divergence)]


def attempt(arm: GatedArm, notes: list[str]) -> tuple[Tensor, ...] | None:
    """Run an arm and return its result.

    If a peer's code fails here, add a note and return None. A failure in mkd's code raises.
    """
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
    """Return the errors of every arm that runs, against float64 on the case's own inputs."""
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
    """Return the largest of each error; NaN if any is NaN."""
    tensor = torch.tensor([[e.loss, e.gradient] for e in errors], dtype=torch.float64)
    return Errors(*tensor.amax(dim=0).tolist())


def reference_chunks(rows: int, width: int, device: torch.device) -> list[slice]:
    """Cut `rows` into slices such that float64 [slice, width] has `REFERENCE_BYTES`."""
    height = max(1, REFERENCE_BYTES[device.type] // (8 * width))
    return [slice(first, min(first + height, rows)) for first in range(0, rows, height)]


def reference_rows(
    student_logits: Tensor,  # [n, v] any float dtype
    teacher_logits: Tensor,  # [n, v]
    loss_mask: Tensor,  # [n]
    divergence: str,
) -> tuple[Tensor, Tensor]:
    """Return the divergence's sum over rows at T = 1, float64 [], and its gradient [n, v].

    The cross entropy is left out.
    """
    student = student_logits.detach().double().requires_grad_()
    vocab = student.shape[1]
    # unused without cross entropy
    labels = torch.zeros(len(student), dtype=torch.int64, device=student.device)
    loss = dense_kd(
        student,
        teacher_logits,
        labels,
        loss_mask,
        KDObjective(vocab, vocab, kd_ratio=1.0, divergence=build_divergence(divergence)),
    ).loss
    (gradient,) = torch.autograd.grad(loss, student)
    return loss.detach(), gradient
