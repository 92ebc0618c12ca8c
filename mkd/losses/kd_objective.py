"""A distillation loss: `KDObjective`, its rows `LossRows` and columns `VocabShard`, its result `KDOutput`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from mkd.errors import UsageError
from mkd.losses.divergence_base import Divergence
from mkd.losses.divergences import KLMixture
from mkd.parallel.axes import place_in

# s(T): "squared" keeps the size of the KD gradient independent of T (Hinton et al. 2015, section 2).
TEMPERATURE_SCALINGS = {"squared": lambda temperature: temperature**2, "none": lambda temperature: 1.0}


@dataclass(frozen=True)
class KDOutput:
    """Sums over the rows of one micro-batch, each row weighted by its mask.

    Divide by the global count for means. Only `loss` has a graph. Apart from the int64 count every field is
    0-dim in the compute dtype: fp64 for fp64 logits, else fp32. Its bits are the same on every
    tensor-parallel rank. None means: not computed for this objective. `loss == (1 - kd_ratio) * ce + kd_ratio
    * kd`.
    """

    loss: Tensor
    ce: Tensor | None  # the student's cross entropy over its real vocabulary, T = 1, nats
    kd: Tensor | None  # divergence over the shared ids, times the temperature scaling
    teacher_ce: Tensor | None  # over the shared ids, T = 1, nats; inf if the teacher lacks a label
    teacher_entropy: Tensor | None  # over the shared ids, T = 1, nats
    top1_agreement: Tensor | None  # rows whose first maximum of the teacher is one of the student
    num_loss_tokens: Tensor  # int64, rows with a non-zero mask
    plain_ce: Tensor | None = None  # `ce` with weight 1 for all of these rows


@dataclass(frozen=True)
class KDObjective:
    """Per row: `(1 - kd_ratio) * CE + kd_ratio * s(temperature) * divergence(teacher, student)`.

    Raises UsageError for a value that makes no loss.
    """

    student_vocab_size: int  # real rows; ids beyond are padding
    teacher_vocab_size: int | None = None  # real rows; needed only if kd_ratio is above 0
    kd_ratio: float = 0.5
    temperature: float = 1.0
    temperature_scaling: str = "squared"  # s(T): "squared" or "none"
    divergence: Divergence = KLMixture(forward=1.0, reverse=0.0)  # see `build_divergence`
    with_ce_metric: bool = False  # compute CE even if kd_ratio is 1

    def __post_init__(self) -> None:
        if not 0.0 <= self.kd_ratio <= 1.0:
            raise UsageError(
                f"kd-ratio is {self.kd_ratio}",
                "the loss is (1 - kd-ratio) * CE + kd-ratio * KD",
                "choose a value from 0 (cross entropy only) to 1 (distillation only)",
                code="out-of-range",
            )
        require_temperature("kd-temperature", self.temperature, self.temperature_scaling)

    def require_teacher(self, given: bool) -> None:
        """Raise UsageError if the objective compares with a teacher and there is none."""
        if self.uses_teacher and not (given and self.teacher_vocab_size is not None):
            raise UsageError(
                f"kd-ratio is {self.kd_ratio} but there are no teacher logits, or no teacher vocabulary size",
                "the divergence compares the student with the teacher",
                "give the loss a teacher, or set kd-ratio to 0",
                code="model-missing",
            )

    @property
    def uses_teacher(self) -> bool:
        """True if the divergence is part of the loss."""
        return self.kd_ratio > 0.0

    @property
    def uses_ce(self) -> bool:
        """True if the cross entropy is part of the loss, not only of the metrics."""
        return self.kd_ratio < 1.0

    @property
    def measures_ce(self) -> bool:
        """True if the cross entropy is computed."""
        return self.uses_ce or self.with_ce_metric

    @property
    def scale(self) -> float:
        """Factor s(T) of the divergence."""
        return TEMPERATURE_SCALINGS[self.temperature_scaling](self.temperature)

    def mixed(self, ce: Tensor | None, kd: Tensor | None) -> Tensor:
        """Return the loss from the sums of its terms; one that is not part of it may be None."""
        parts = [(1.0 - self.kd_ratio) * ce] if self.uses_ce else []
        parts += [self.kd_ratio * kd] if self.uses_teacher else []
        return sum(parts)

    @property
    def num_shared_ids(self) -> int:
        """Number of ids that both models have: the first ones of each."""
        if self.teacher_vocab_size is None:
            return self.student_vocab_size
        return min(self.student_vocab_size, self.teacher_vocab_size)

    @property
    def ce_reads_kd_softmax(self) -> bool:
        """True if CE and KD read the same softmax of the student: same temperature, same columns."""
        is_same = self.temperature == 1.0 and self.student_vocab_size == self.num_shared_ids
        return self.uses_teacher and is_same

    @cached_property
    def statistic_names(self) -> tuple[str, ...]:
        """Names of the [k, n] statistics of a shard (k <= 13), in order; see `mkd/losses/statistics.py`."""
        names: tuple[str, ...] = ()
        if self.uses_teacher:
            names += ("student_max", "student_sum", "teacher_max", "teacher_sum")
            names += self.divergence.cross_names + ("plain_sum",) * (self.temperature != 1.0)
            names += ("plain_mean", "teacher_label", "student_at_teacher_top")
        if self.measures_ce:
            names += () if self.ce_reads_kd_softmax else ("ce_max", "ce_sum")
            names += ("ce_label",)
        return names


def require_temperature(name: str, temperature: float, scaling: str) -> None:
    """Raise UsageError unless `temperature` can divide logits and `scaling` is in `TEMPERATURE_SCALINGS`."""
    if not (math.isfinite(temperature) and temperature > 0.0):
        raise UsageError(
            f"{name} is {temperature}",
            "the logits are divided by it",
            "choose a finite value above 0; 1 leaves the distributions as they are",
            code="out-of-range",
        )
    if scaling not in TEMPERATURE_SCALINGS:
        do = f"choose one of: {', '.join(sorted(TEMPERATURE_SCALINGS))}"
        raise UsageError(f"{name}-scaling is {scaling!r}", "mkd has no such rule", do, code="value-unknown")


def require_columns(name: str, vocab_size: int, columns: int) -> None:
    """Raise UsageError unless `vocab_size` real ids fit the columns of all shards together."""
    if not 0 < vocab_size <= columns:
        raise UsageError(
            f"{name} is {vocab_size}, the logits have {columns} columns",
            "each real id has a column, and columns beyond are padding",
            f"choose a value from 1 to {columns}, or pad the LM heads to more columns",
            code="out-of-range",
        )


class LossRows(NamedTuple):
    """Rows of a micro-batch on one vocabulary shard, as the passes over logits read them."""

    student: Tensor  # [n, w] logits, bf16/fp32/fp64
    teacher: Tensor | None  # [n, w], same columns; None if the objective has no teacher
    labels: Tensor  # [n] int64, global vocabulary ids
    mask: Tensor  # [n] compute dtype, weight of each row; rows of weight 0 may hold anything

    def block(self, rows: slice) -> LossRows:
        return LossRows(*(None if one is None else one[rows] for one in self))


@dataclass(frozen=True)
class VocabShard:
    """The vocabulary ids of this tensor-parallel rank: local column j is id `start + j`.

    Real columns come first in every shard; a shard may have none.
    """

    rank: int  # in the tensor-parallel group
    start: int
    student: int  # local columns that are real rows of the student
    shared: int  # local columns that are real rows of both models
    is_split: bool  # other ranks have other columns

    @classmethod
    def of_group(cls, width: int, tp_group: dist.ProcessGroup | None, objective: KDObjective) -> VocabShard:
        """Return this process's shard of `width` columns; without a group the vocabulary is not split.

        Raises UsageError if a model has more real ids than all shards have columns.
        """
        rank, size = place_in(tp_group)
        for name in ("student_vocab_size", "teacher_vocab_size"):
            if (vocab_size := getattr(objective, name)) is not None:
                require_columns(name, vocab_size, width * size)
        return cls.of(width, rank, size, objective)

    @classmethod
    def of(cls, width: int, rank: int, size: int, objective: KDObjective) -> VocabShard:
        """Return shard `rank` of `size` shards of `width` columns (Megatron's `VocabUtility` layout)."""
        return cls.at(shard_start(width, rank, size), width, rank, size, objective)

    @classmethod
    def at(cls, start: int, width: int, rank: int, size: int, objective: KDObjective) -> VocabShard:
        """Return the shard of the `width` columns from id `start` on; shards may differ in width."""
        student = min(max(objective.student_vocab_size - start, 0), width)
        shared = min(max(objective.num_shared_ids - start, 0), width)
        return cls(rank, start, student, shared if objective.uses_teacher else 0, size > 1)


def shard_start(width: int, rank: int, size: int) -> int:
    """Return the first id of shard `rank` of `size` shards of `width` columns, by Megatron's rule.

    Without shards Megatron is not imported: the losses work in processes that do not use it.
    """
    if size == 1:
        return 0
    from megatron.core.tensor_parallel.utils import VocabUtility

    return VocabUtility.vocab_range_from_per_partition_vocab_size(width, rank, size)[0]
