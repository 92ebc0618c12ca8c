"""Statistics of every row after one pass over its logits, and their merge over vocabulary shards.

A shard contributes [k, n] statistics (`KDObjective.statistic_names`), one all-gather brings them together,
and `merge_statistics` makes row values of the whole vocabulary from them. This holds for logits that exist in
full and for a head that makes them block by block. It also holds for torch passes and for Triton passes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.losses.kd_objective import KDObjective, VocabShard
from mkd.losses.softmax import Normaliser, RowSoftmax


@dataclass(frozen=True)
class MergedStatistics:
    """Row values of the whole vocabulary, all [n] in the compute dtype; None: not needed."""

    ce: Tensor | None = None
    kd: Tensor | None = None  # without the temperature scaling
    residual: Tensor | None = None  # number that the divergence's gradient needs beside both softmaxes
    teacher_ce: Tensor | None = None
    teacher_entropy: Tensor | None = None
    top1_agreement: Tensor | None = None  # 0 or 1
    student: RowSoftmax | None = None  # at the objective's temperature, over the shared ids
    teacher: RowSoftmax | None = None
    student_plain: RowSoftmax | None = None  # at T = 1, over the student's ids: softmax of the CE

    def rows(self, rows: slice) -> MergedStatistics:
        """Return the values of some rows."""

        def cut(value):
            return None if value is None else value[rows] if isinstance(value, Tensor) else value.rows(rows)

        return MergedStatistics(**{f.name: cut(getattr(self, f.name)) for f in fields(self)})


def gather_statistics(local: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
    """Gather [k, n] of every shard: all-gather over the tensor-parallel group to [tp, k, n]; no backward."""
    size = 1 if tp_group is None else dist.get_world_size(tp_group)
    if size == 1 or local.shape[1] == 0:
        return local.expand(size, *local.shape)
    gathered = local.new_empty(size * local.shape[0], local.shape[1])
    dist.all_gather_into_tensor(gathered, local, group=tp_group)
    return gathered.view(size, *local.shape)


def merge_statistics(gathered: Tensor, shard: VocabShard, objective: KDObjective) -> MergedStatistics:
    """Merge the statistics of all shards, [tp, k, n]. A label that no shard owns has cross entropy +inf."""
    named = dict(zip(objective.statistic_names, gathered.unbind(dim=1), strict=True))
    merged: dict[str, Tensor | RowSoftmax | None] = {}
    student = None
    if objective.uses_teacher:
        student = Normaliser.merge(named["student_max"], named["student_sum"], objective.temperature)
        teacher = Normaliser.merge(named["teacher_max"], named["teacher_sum"], objective.temperature)
        merged |= _teacher_metrics(named, student, teacher, objective)
        merged["student"], merged["teacher"] = student.of_rank(shard.rank), teacher.of_rank(shard.rank)
        if not objective.divergence.needs_terms:
            cross = {name: named[name] for name in objective.divergence.cross_names}
            merged["kd"], merged["residual"] = objective.divergence.merge(cross, student, teacher)
    if objective.measures_ce:
        plain = student
        if not objective.ce_reads_kd_softmax:
            plain = Normaliser.merge(named["ce_max"], named["ce_sum"], 1.0)
        merged["ce"] = _cross_entropy(plain, named["ce_label"])
        merged["student_plain"] = plain.of_rank(shard.rank)
    return MergedStatistics(**merged)


def add_terms(merged: MergedStatistics, terms: Tensor, objective: KDObjective) -> MergedStatistics:
    """Return `merged` with the divergence from the `terms` [k, n] of a second pass, summed over shards."""
    kd, residual = objective.divergence.from_terms(terms)
    return replace(merged, kd=kd, residual=residual)


def _teacher_metrics(
    named: dict[str, Tensor], student: Normaliser, teacher: Normaliser, objective: KDObjective
) -> dict[str, Tensor]:
    plain = teacher
    if objective.temperature != 1.0:
        plain = Normaliser.merge(named["teacher_max"], named["plain_sum"], 1.0)
    top_rank = named["teacher_max"].argmax(dim=0, keepdim=True)
    student_at_top = named["student_at_teacher_top"].gather(0, top_rank).squeeze(0)
    return {
        "teacher_ce": _cross_entropy(plain, named["teacher_label"]),
        "teacher_entropy": plain.log_sum - plain.mean_centred(named["plain_mean"]),
        "top1_agreement": (student_at_top == student.maximum).to(student_at_top.dtype),
    }


def _cross_entropy(normaliser: Normaliser, label_logits: Tensor) -> Tensor:
    """Return ln S - (z_y - max z), [n], from each rank's label logit [tp, n]."""
    return normaliser.log_sum - (label_logits.amax(dim=0) - normaliser.maximum)


@dataclass(frozen=True)
class RowValues:
    """Values of rows, [n] each in the compute dtype, each times the row's mask.

    Only `loss` has a graph; None: not computed for this objective. See `KDOutput`.
    """

    loss: Tensor
    ce: Tensor | None
    kd: Tensor | None
    teacher_ce: Tensor | None
    teacher_entropy: Tensor | None
    top1_agreement: Tensor | None


VALUE_NAMES = ("ce", "kd", "teacher_ce", "teacher_entropy", "top1_agreement")


def row_values(
    merged: MergedStatistics, loss_mask: Tensor, objective: KDObjective
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return (the loss, the other fields of `RowValues`) from row values and row weights [n].

    A row of weight 0 may hold NaN.
    """
    values: dict[str, Tensor | None] = {}
    for name in VALUE_NAMES:
        value = getattr(merged, name)
        values[name] = None if value is None else torch.where(loss_mask != 0, loss_mask * value, 0.0)
    if objective.uses_teacher:
        values["kd"] = objective.scale * values["kd"]
    return objective.mixed(values["ce"], values["kd"]), values


def weighted_sums(
    merged: MergedStatistics, loss_mask: Tensor, objective: KDObjective
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return (the loss, the other fields of `KDOutput`) from row values and row weights [n].

    A row of weight 0 may hold NaN.
    """
    present = [name for name in VALUE_NAMES if getattr(merged, name) is not None]
    is_loss_row = loss_mask != 0
    values = torch.stack([getattr(merged, name) for name in present])
    totals = torch.where(is_loss_row, loss_mask * values, 0.0).sum(dim=1)
    sums: dict[str, Tensor | None] = dict.fromkeys(VALUE_NAMES) | dict(
        zip(present, totals.unbind(), strict=True)
    )
    if objective.uses_teacher:
        sums["kd"] = objective.scale * sums["kd"]
    sums["num_loss_tokens"] = is_loss_row.sum()
    if merged.ce is not None:
        sums["plain_ce"] = torch.where(is_loss_row, merged.ce, 0.0).sum()
    return objective.mixed(sums["ce"], sums["kd"]), sums
