"""Row statistics of a loss on one vocabulary shard, their merge across ranks, and the gradient they allow.

Three pure functions on chunks of rows, the same for logits that exist in full and for a head that makes them chunk by
chunk: `local_statistics` (this rank), `merge_statistics` (after one all-gather), `gradient` (this rank, no
communication). None of them modifies its arguments. Legend: n rows, w local columns, tp ranks.

The cross-entropy side follows Megatron's `VocabParallelCrossEntropy`: its rule for targets of other shards, and its
`prepare_gradient_calculation_operands` and `calculate_gradients` for softmax minus one-hot. Its forward helpers are
not called: `calculate_logits_max` rounds fp64 to fp32, `calculate_predicted_logits` overwrites the logits that the
divergence still reads, and in sequence they take a collective each where one is enough.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
from torch import Tensor

from mkd.losses.objective import KDObjective, VocabShard
from mkd.losses.softmax import Normaliser, ShardSoftmax, local_softmax, real_columns


def local_statistics(
    student: Tensor,  # [n, w] bf16/fp32/fp64
    teacher: Tensor | None,  # [n, w], same columns; None when the objective has no teacher
    labels: Tensor,  # [n] int64, global vocabulary ids
    shard: VocabShard,
    objective: KDObjective,
) -> dict[str, Tensor]:
    """Named [n] statistics in the compute dtype; names and order depend on the objective alone."""
    statistics: dict[str, Tensor] = {}
    own = None
    if objective.uses_teacher:
        own = ShardSoftmax.of(real_columns(student, shard.shared), objective.temperature)
        statistics |= _kd_statistics(own, real_columns(teacher, shard.shared), labels, shard, objective)
    if objective.measures_ce:
        if not objective.ce_reads_kd_softmax:
            own = ShardSoftmax.of(real_columns(student, shard.student), 1.0)
        statistics["ce_max"] = own.maximum
        statistics["ce_sum"] = own.total
        statistics["ce_label"] = _label_logit(own.logits, labels, shard.start, shard.student)
    return statistics


def _kd_statistics(
    student: ShardSoftmax, teacher_logits: Tensor, labels: Tensor, shard: VocabShard, objective: KDObjective
) -> dict[str, Tensor]:
    teacher = ShardSoftmax.of(teacher_logits, objective.temperature)
    plain = teacher if objective.temperature == 1.0 else ShardSoftmax.of(teacher_logits, 1.0)
    top = teacher_logits.argmax(dim=1, keepdim=True)
    return {
        "student_max": student.maximum,
        "student_sum": student.total,
        "teacher_max": teacher.maximum,
        "teacher_sum": teacher.total,
        "cross": objective.rule.local(student, teacher),
        "plain_sum": plain.total,
        "plain_mean": plain.centred().mul_(plain.probabilities).sum(dim=1),
        "teacher_label": _label_logit(teacher_logits, labels, shard.start, shard.shared),
        "student_at_teacher_top": student.logits.gather(1, top).squeeze(1),
    }


def _foreign_labels(labels: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """(mask [n] of labels outside [start, start + count), local index [n], 0 where outside)."""
    outside = (labels < start) | (labels >= start + count)
    return outside, (labels - start).masked_fill(outside, 0)


def _label_logit(logits: Tensor, labels: Tensor, start: int, count: int) -> Tensor:
    """The label's logit where this shard owns the label, else -inf (the maximum over ranks finds the owner)."""
    outside, index = _foreign_labels(labels, start, count)
    return logits.gather(1, index[:, None]).squeeze(1).masked_fill(outside, float("-inf"))


@dataclass(frozen=True)
class MergedStatistics:
    """Row values of the whole vocabulary, and this rank's share of each softmax; all [n], None where not computed."""

    ce: Tensor | None
    kd: Tensor | None  # without the temperature scaling
    teacher_ce: Tensor | None
    teacher_entropy: Tensor | None
    top1_agreement: Tensor | None  # 0 or 1
    ce_share: Tensor | None
    student_share: Tensor | None  # at the objective's temperature, over the shared ids
    teacher_share: Tensor | None

    def rows(self, rows: slice) -> MergedStatistics:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return MergedStatistics(**{name: None if value is None else value[rows] for name, value in values.items()})


def merge_statistics(gathered: dict[str, Tensor], shard: VocabShard, objective: KDObjective) -> MergedStatistics:
    """Merge `local_statistics` of all ranks, each [tp, n]. A label that no rank owns has cross entropy +inf."""
    merged: dict[str, Tensor | None] = dict.fromkeys(f.name for f in fields(MergedStatistics))
    if objective.measures_ce:
        ce = Normaliser.merge(gathered["ce_max"], gathered["ce_sum"], 1.0)
        merged["ce"] = _cross_entropy(ce, gathered["ce_label"])
        merged["ce_share"] = ce.share[shard.rank]
    if objective.uses_teacher:
        student = Normaliser.merge(gathered["student_max"], gathered["student_sum"], objective.temperature)
        teacher = Normaliser.merge(gathered["teacher_max"], gathered["teacher_sum"], objective.temperature)
        plain = Normaliser.merge(gathered["teacher_max"], gathered["plain_sum"], 1.0)
        merged["kd"] = objective.rule.value(gathered["cross"], student, teacher)
        merged["student_share"] = student.share[shard.rank]
        merged["teacher_share"] = teacher.share[shard.rank]
        merged["teacher_ce"] = _cross_entropy(plain, gathered["teacher_label"])
        merged["teacher_entropy"] = plain.log_sum - plain.mean_centred(gathered["plain_mean"])
        top_rank = gathered["teacher_max"].argmax(dim=0, keepdim=True)
        student_at_top = gathered["student_at_teacher_top"].gather(0, top_rank).squeeze(0)
        merged["top1_agreement"] = (student_at_top == student.maximum).to(student_at_top.dtype)
    return MergedStatistics(**merged)


def _cross_entropy(normaliser: Normaliser, label_logits: Tensor) -> Tensor:
    """ln S - (z_y - max z), [n], from each rank's label logit [tp, n]."""
    return normaliser.log_sum - (label_logits.amax(dim=0) - normaliser.maximum)


def gradient(
    student: Tensor,  # [n, w] bf16/fp32/fp64
    teacher: Tensor | None,  # [n, w]
    labels: Tensor,  # [n] int64
    merged: MergedStatistics,  # of these n rows
    row_weight: Tensor,  # [n] compute dtype, derivative of the final scalar by a row's loss
    shard: VocabShard,
    objective: KDObjective,
) -> Tensor:
    """d loss / d student logits, compute dtype, on the first columns; every column beyond the returned ones has zero.

    Row by row: w [(1-r) (softmax(z_s) - 1[y]) + r s(T)/T dD/da].
    """
    probabilities = result = None
    if objective.uses_teacher and shard.shared:
        probabilities = _global_softmax(student, shard.shared, objective.temperature, merged.student_share)
        target = _global_softmax(teacher, shard.shared, objective.temperature, merged.teacher_share)
        weight = row_weight * (objective.kd_ratio * objective.scale / objective.temperature)
        result = objective.rule.gradient(probabilities, target, merged.kd).mul_(weight[:, None])
    if objective.uses_ce and shard.student:
        if not objective.ce_reads_kd_softmax:
            probabilities = _global_softmax(student, shard.student, 1.0, merged.ce_share)
        ce = _ce_gradient(probabilities, labels, shard, row_weight * (1.0 - objective.kd_ratio))
        if result is not None:
            ce[:, : shard.shared].add_(result)
        result = ce
    return row_weight.new_zeros(student.shape[0], 0) if result is None else result


def _global_softmax(logits: Tensor, count: int, temperature: float, share: Tensor) -> Tensor:
    """The whole vocabulary's softmax on this shard's first `count` columns, [n, count], a new tensor."""
    return local_softmax(real_columns(logits, count), temperature).mul_(share[:, None])


def _ce_gradient(probabilities: Tensor, labels: Tensor, shard: VocabShard, weight: Tensor) -> Tensor:
    """weight * (softmax - one-hot) by Megatron's helpers; writes over `probabilities` [n, shard.student]."""
    outside, index = _foreign_labels(labels, shard.start, shard.student)
    helper = VocabParallelCrossEntropy
    flat, row_index, one_hot, operand = helper.prepare_gradient_calculation_operands(probabilities, outside)
    one_hot = one_hot.to(probabilities.dtype)
    return helper.calculate_gradients(flat, row_index, index, one_hot, operand, weight)
