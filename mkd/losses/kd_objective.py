"""What a distillation loss computes (`KDObjective`), on which columns (`VocabShard`), what it returns (`KDOutput`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from megatron.core.tensor_parallel.utils import VocabUtility
from torch import Tensor

from mkd.errors import UsageError
from mkd.losses.divergences import DIVERGENCES, Divergence

# s(T): "squared" keeps the size of the KD gradient independent of T (Hinton et al. 2015, section 2).
TEMPERATURE_SCALINGS = {"squared": lambda temperature: temperature**2, "none": lambda temperature: 1.0}


@dataclass(frozen=True)
class KDOutput:
    """Sums over the rows of one micro-batch, each row weighted by its mask; divide by the global count for means.

    `loss` alone carries a graph. Apart from the int64 count every field is 0-dim in the compute dtype (fp64 for fp64
    logits, else fp32), and the same bits on every tensor-parallel rank. None means: not computed for this objective.
    `loss == (1 - kd_ratio) * ce + kd_ratio * kd`.
    """

    loss: Tensor
    ce: Tensor | None  # student's cross entropy over its real vocabulary, T = 1, nats
    kd: Tensor | None  # divergence over the shared ids, times the temperature scaling
    teacher_ce: (
        Tensor | None
    )  # teacher's cross entropy over the shared ids, T = 1, nats; inf if it lacks a label
    teacher_entropy: Tensor | None  # teacher's entropy over the shared ids, T = 1, nats
    top1_agreement: (
        Tensor | None
    )  # rows where the teacher's first maximum is a maximum of the student, shared ids
    num_loss_tokens: Tensor  # int64, rows with a non-zero mask


@dataclass(frozen=True)
class KDObjective:
    """Per row: `(1 - kd_ratio) * CE + kd_ratio * s(temperature) * divergence(teacher, student)`.

    Raises UsageError for a value that makes no loss.
    """

    kd_ratio: float
    temperature: float
    temperature_scaling: str
    divergence: str
    with_ce_metric: bool
    student_vocab_size: int  # real rows; ids beyond are padding
    teacher_vocab_size: int  # real rows; not read when kd_ratio is 0
    jsd_beta: float = (
        0.5  # weight of the teacher in the mixture of `jsd`; 0 and 1 mean forward and reverse KL
    )
    mixed_kl_weight: float = 0.5  # weight of the forward KL in `mixed_kl`; the reverse KL has the rest

    @classmethod
    def of(
        cls,
        student_vocab_size: int,
        teacher_vocab_size: int | None,
        kd_ratio: float,
        temperature: float,
        temperature_scaling: str,
        divergence: str,
        jsd_beta: float,
        mixed_kl_weight: float,
        with_ce_metric: bool,
    ) -> KDObjective:
        """From the arguments that all losses share; without a teacher's vocabulary the student's stands in."""
        teacher_vocab_size = student_vocab_size if teacher_vocab_size is None else teacher_vocab_size
        settings = kd_ratio, temperature, temperature_scaling, divergence, with_ce_metric
        return cls(*settings, student_vocab_size, teacher_vocab_size, jsd_beta, mixed_kl_weight)

    def __post_init__(self) -> None:
        if not 0.0 <= self.kd_ratio <= 1.0:
            raise UsageError(
                f"kd-ratio is {self.kd_ratio}",
                "the loss is (1 - kd-ratio) * CE + kd-ratio * KD",
                "choose a value from 0 (cross entropy only) to 1 (distillation only)",
                code="kd-ratio-out-of-range",
            )
        if not (math.isfinite(self.temperature) and self.temperature > 0.0):
            raise UsageError(
                f"kd-temperature is {self.temperature}",
                "the logits are divided by it",
                "choose a finite value above 0; 1 leaves the distributions as they are",
                code="kd-temperature-out-of-range",
            )
        _require_known("kd-temperature-scaling", self.temperature_scaling, TEMPERATURE_SCALINGS)
        _require_known("kd-divergence", self.divergence, DIVERGENCES)
        for flag, weight in (("kd-jsd-beta", self.jsd_beta), ("kd-mixed-kl-weight", self.mixed_kl_weight)):
            if not 0.0 <= weight <= 1.0:
                why = "it is a weight between two distributions"
                raise UsageError(
                    f"{flag} is {weight}",
                    why,
                    "choose a value from 0 to 1",
                    code="divergence-weight-out-of-range",
                )

    def require_teacher(self, given: bool) -> None:
        """Raises UsageError where the objective compares with a teacher and there is none."""
        if self.uses_teacher and not given:
            raise UsageError(
                f"kd-ratio is {self.kd_ratio} but there are no teacher logits, or no teacher vocabulary size",
                "the divergence compares the student with the teacher",
                "give the loss a teacher, or set kd-ratio to 0",
                code="kd-teacher-logits-missing",
            )

    @property
    def uses_teacher(self) -> bool:
        return self.kd_ratio > 0.0

    @property
    def uses_ce(self) -> bool:
        """Whether cross entropy is part of the loss (not only of the metrics)."""
        return self.kd_ratio < 1.0

    @property
    def measures_ce(self) -> bool:
        return self.uses_ce or self.with_ce_metric

    @property
    def scale(self) -> float:
        """s(T)."""
        return TEMPERATURE_SCALINGS[self.temperature_scaling](self.temperature)

    @cached_property
    def rule(self) -> Divergence:
        return DIVERGENCES[self.divergence](self.jsd_beta, self.mixed_kl_weight)

    @property
    def num_shared_ids(self) -> int:
        return min(self.student_vocab_size, self.teacher_vocab_size)

    @property
    def ce_reads_kd_softmax(self) -> bool:
        """Whether CE and KD need one and the same softmax of the student: same temperature, same columns."""
        return (
            self.uses_teacher and self.temperature == 1.0 and self.student_vocab_size == self.num_shared_ids
        )

    @cached_property
    def statistic_names(self) -> tuple[str, ...]:
        """Rows of the [k, n] statistics that a shard contributes (k <= 13), in order; see `mkd/losses/statistics.py`."""
        names: tuple[str, ...] = ()
        if self.uses_teacher:
            names += ("student_max", "student_sum", "teacher_max", "teacher_sum", *self.rule.cross_names)
            names += ("plain_sum",) * (self.temperature != 1.0)
            names += ("plain_mean", "teacher_label", "student_at_teacher_top")
        if self.measures_ce:
            names += () if self.ce_reads_kd_softmax else ("ce_max", "ce_sum")
            names += ("ce_label",)
        return names


def _require_known(flag: str, name: str, table: dict) -> None:
    if name not in table:
        known = ", ".join(sorted(table))
        raise UsageError(
            f"{flag} is {name!r}", "mkd has no such rule", f"choose one of: {known}", code="kd-rule-unknown"
        )


def require_columns(name: str, vocab_size: int, columns: int) -> None:
    """Raises UsageError where the logits of a vocabulary, of all shards, cannot have `vocab_size` real ids."""
    if not 0 < vocab_size <= columns:
        raise UsageError(
            f"{name} is {vocab_size}, the logits have {columns} columns",
            "each real id has a column, and columns beyond are padding",
            f"choose a value from 1 to {columns}, or pad the LM heads to more columns",
            code="logits-columns-too-few",
        )


@dataclass(frozen=True)
class VocabShard:
    """The vocabulary ids of this tensor-parallel rank: local column j is id `start + j`.

    Real columns come first in every shard; a shard may hold none.
    """

    rank: int  # in the tensor-parallel group
    start: int
    student: int  # local columns that are real rows of the student
    shared: int  # local columns that are real rows of both models

    @classmethod
    def of_group(cls, width: int, tp_group: dist.ProcessGroup | None, objective: KDObjective) -> VocabShard:
        """This process's shard of `width` columns; None is a vocabulary that is not split.

        Raises UsageError where a model has more real ids than all shards have columns.
        """
        rank, size = (0, 1) if tp_group is None else (dist.get_rank(tp_group), dist.get_world_size(tp_group))
        for name in ("student_vocab_size", "teacher_vocab_size"):
            require_columns(name, getattr(objective, name), width * size)
        return cls.of(width, rank, size, objective)

    @classmethod
    def of(cls, width: int, rank: int, size: int, objective: KDObjective) -> VocabShard:
        """Shard `rank` of `size` equal ones of `width` columns (Megatron's `VocabUtility` layout)."""
        start, _ = VocabUtility.vocab_range_from_per_partition_vocab_size(width, rank, size)
        student = min(max(objective.student_vocab_size - start, 0), width)
        shared = min(max(objective.num_shared_ids - start, 0), width)
        return cls(rank, start, student, shared if objective.uses_teacher else 0)
