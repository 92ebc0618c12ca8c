"""What the micro-batches of a step report: sums to add up, and the one division that makes means of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from mkd.losses import KDOutput


@dataclass(frozen=True)
class TeacherSums:
    """One teacher's sums over the rows it is compared on: the loss tokens, or with tokens of its own the aligned chunks.

    Floats, or 0-dim tensors while they are being added up. A row weighs as the teacher does in its pack.
    """

    kd: float = 0.0  # weighted divergence, temperature scaling included
    weight: float = 0.0  # of all rows
    rows: float = 0.0
    ce: float = 0.0  # the teacher's own, nats ...
    entropy: float = 0.0
    tokens: float = 0.0  # ... and what both are out of
    top1_agreement: float = 0.0
    compared: float = 0.0  # what that is out of

    @classmethod
    def of(cls, output: KDOutput, rows: Tensor) -> TeacherSums:
        """Of a loss over `rows` loss tokens that are weighted by the mask; with equal weights all counts are `rows`."""
        return cls(
            output.kd,
            rows,
            rows,
            output.teacher_ce,
            output.teacher_entropy,
            rows,
            output.top1_agreement,
            rows,
        )


TEACHER_FIELDS = tuple(field.name for field in fields(TeacherSums))
STUDENT_FIELDS = ("ce", "num_loss_tokens")


def report_size(num_teachers: int) -> int:
    """Length of a report."""
    return len(STUDENT_FIELDS) + num_teachers * len(TEACHER_FIELDS)


def report(ce: Tensor | None, num_loss_tokens: int, teachers: Sequence[TeacherSums], like: Tensor) -> Tensor:
    """The sums of one micro-batch as a vector, fp64 [report_size], on the device of `like`. None counts as 0."""
    values = [ce, num_loss_tokens, *(getattr(one, name) for one in teachers for name in TEACHER_FIELDS)]
    zero = torch.zeros((), dtype=torch.float64, device=like.device)
    return torch.stack([_as_double(value, zero) for value in values])


def _as_double(value: Tensor | float | None, zero: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().double()
    return zero + value if value else zero


@dataclass(frozen=True)
class LossSums:
    """The sums of a global batch, or of a whole evaluation."""

    kd_ratio: float
    ce: float
    num_loss_tokens: int
    teachers: Mapping[str, TeacherSums]  # by name

    @classmethod
    def of(cls, vector: Tensor, names: Sequence[str], kd_ratio: float) -> LossSums:
        """From the added-up reports [report_size]. Waits for the device."""
        ce, num_loss_tokens, *rest = vector.tolist()
        size = len(TEACHER_FIELDS)
        teachers = {name: TeacherSums(*rest[i * size : (i + 1) * size]) for i, name in enumerate(names)}
        return cls(kd_ratio, ce, int(num_loss_tokens), teachers)

    @property
    def kd_mean(self) -> float:
        """Sum over the teachers of their weighted divergences, each a mean over its own rows."""
        return sum(mean(one.kd, one.rows) for one in self.teachers.values())

    def token_sums(self) -> dict[str, float]:
        """`loss`, `ce`, `kd`, `teacher_ce`, `teacher_entropy`, `top1_agreement` as sums over `num_loss_tokens`.

        Teachers' metrics are means weighted as the teachers are, times `num_loss_tokens`.
        """
        count = self.num_loss_tokens
        kd = self.kd_mean * count
        sums = {"loss": (1 - self.kd_ratio) * self.ce + self.kd_ratio * kd, "ce": self.ce, "kd": kd}
        shares = [(mean(one.weight, one.rows), one) for one in self.teachers.values()]
        total = sum(share for share, _ in shares)
        for name, part, out_of in (
            ("teacher_ce", "ce", "tokens"),
            ("teacher_entropy", "entropy", "tokens"),
            ("top1_agreement", "top1_agreement", "compared"),
        ):
            value = sum(share * mean(getattr(one, part), getattr(one, out_of)) for share, one in shares)
            sums[name] = mean(value, total) * count
        return sums | {"num_loss_tokens": count}

    def per_teacher(self) -> dict[str, tuple[float, float]]:
        """(sum, what to divide it by) by metric key, where there are several teachers or one that has its own tokens."""
        metrics = {}
        for name, one in self.teachers.items():
            metrics[f"kd_loss/{name}"] = (one.kd, one.weight)
            metrics[f"teacher_weight/{name}"] = (one.weight, one.rows)
            metrics[f"teacher_ce/{name}"] = (one.ce, one.tokens)
            metrics[f"teacher_entropy/{name}"] = (one.entropy, one.tokens)
            metrics[f"top1_agreement/{name}"] = (one.top1_agreement, one.compared)
            metrics[f"num_aligned/{name}"] = (one.rows, 1)
        return metrics


def mean(total: float, count: float) -> float:
    """0 of nothing."""
    return total / count if count else 0.0
