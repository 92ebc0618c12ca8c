"""Row statistics of the top-k divergence on one vocabulary shard, their merge across ranks, and the gradient.

The teacher is known by its k most probable ids and by the remaining mass, the REST bucket. KL is taken over
these k + 1 buckets:

    KL = sum_{i in top-k} p_t(i) (ln p_t(i) - ln p_s(i)) + R_t (ln R_t - ln r_s)
    R_t = 1 - sum_{i in top-k} p_t(i)
    dKL/da_j = p_s(j) - p_t(j) for j in the top-k,   q_j (r_s - R_t) for the others,   q_j = p_s(j) / r_s

It compares two distributions, hence it is never negative (a sum over the top-k alone can be), and at most the
full KL. The student's mass outside the top-k, r_s, has a separate maximum and sum over those columns alone:
`1 - sum p_s(i)` would lose it to rounding. With q_j as a separate softmax the gradient divides by nothing
that can vanish.

Legend: n rows, w local columns, k ids, tp ranks, a = z_s / T. No function modifies its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from mkd.losses.kd_objective import KDObjective, VocabShard
from mkd.losses.softmax import LOWEST, Normaliser, compute_dtype, real_columns


@dataclass(frozen=True)
class TeacherBuckets:
    """The teacher's distribution over k + 1 buckets; it sums to 1."""

    log_p: Tensor  # [n, k] compute dtype
    p: Tensor  # [n, k]
    rest: Tensor  # [n] R_t, 0 where the k ids are all there are

    @classmethod
    def of(cls, logprobs: Tensor, dtype: torch.dtype, objective: KDObjective) -> TeacherBuckets:
        """Build from stored log-probabilities [n, k]; scale them down if they sum to more than 1."""
        has_rest = logprobs.shape[1] < objective.num_shared_ids
        log_p = logprobs.to(dtype)
        mass = log_p.exp().sum(dim=1)
        log_p = log_p - (mass.clamp(min=1.0) if has_rest else mass).log()[:, None]
        rest = (1.0 - mass).clamp(min=0.0) if has_rest else torch.zeros_like(mass)
        return cls(log_p, log_p.exp(), rest)


def kd_statistics(
    student: Tensor,  # [n, w] bf16/fp32/fp64
    ids: Tensor,  # [n, k] int, distinct in each row
    teacher: TeacherBuckets,
    shard: VocabShard,
    objective: KDObjective,
) -> dict[str, Tensor]:
    """Return named [n] statistics in the compute dtype; `teacher_*` are the same on every rank."""
    temperature = objective.temperature
    logits = real_columns(student, shard.shared)
    own, index = _locate(ids, shard.start, shard.shared)
    at_ids = logits.gather(1, index.masked_fill(~own, 0)).masked_fill_(~own, LOWEST)
    others = _with_spare_column(logits).scatter_(1, index, LOWEST)[:, :-1]
    set_max, rest_max = at_ids.amax(dim=1), others.amax(dim=1)
    centred = (at_ids - set_max[:, None]) / temperature
    terms = torch.where(own & (teacher.p > 0), teacher.p * (teacher.log_p - centred), 0.0)
    top = teacher.log_p.argmax(dim=1, keepdim=True)
    return {
        "set_max": set_max,
        "set_sum": centred.exp().sum(dim=1),
        "rest_max": rest_max,
        "rest_sum": others.sub_(rest_max[:, None]).div_(temperature).exp_().sum(dim=1),
        "cross": terms.sum(dim=1),
        "own_mass": torch.where(own, teacher.p, 0.0).sum(dim=1),
        "teacher_rest": teacher.rest,
        "student_at_teacher_top": at_ids.gather(1, top).squeeze(1),
    }


@dataclass(frozen=True)
class MergedTopK:
    """Row values of the whole vocabulary, and numbers that the gradient pass needs; all [n]."""

    value: Tensor  # KL, without the temperature scaling
    top1_agreement: Tensor  # 0 or 1
    set_maximum: Tensor  # of the student's logits at the teacher's ids
    set_log_norm: Tensor  # p_s(i) = exp((z_i - set_maximum) / T - set_log_norm)
    rest_maximum: Tensor  # of the student's other logits
    rest_log_norm: Tensor  # q_j = exp((z_j - rest_maximum) / T - rest_log_norm)
    rest_difference: Tensor  # r_s - R_t

    def rows(self, rows: slice) -> MergedTopK:
        return MergedTopK(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


def merge_kd(gathered: dict[str, Tensor], objective: KDObjective) -> MergedTopK:
    """Merge `kd_statistics` of all ranks, each [tp, n]."""
    temperature = objective.temperature
    in_set = Normaliser.merge(gathered["set_max"], gathered["set_sum"], temperature)
    others = Normaliser.merge(gathered["rest_max"], gathered["rest_sum"], temperature)
    maximum = torch.maximum(in_set.maximum, others.maximum)
    set_shift = (in_set.maximum - maximum) / temperature
    log_others = (others.maximum - maximum) / temperature + others.log_sum
    log_sum = torch.logaddexp(set_shift + in_set.log_sum, log_others)
    log_rest = log_others - log_sum
    teacher_rest = gathered["teacher_rest"][0]
    cross = (gathered["cross"] - gathered["own_mass"] * in_set.shift).sum(dim=0)
    value = cross + gathered["own_mass"].sum(dim=0) * (log_sum - set_shift)
    value = value + torch.where(teacher_rest > 0, teacher_rest * (teacher_rest.log() - log_rest), 0.0)
    return MergedTopK(
        value=value.clamp(min=0.0),  # rounding alone makes it negative, where both models agree
        top1_agreement=(gathered["student_at_teacher_top"].amax(dim=0) == maximum).to(value.dtype),
        set_maximum=in_set.maximum,
        set_log_norm=log_sum - set_shift,
        rest_maximum=others.maximum,
        rest_log_norm=others.log_sum,
        rest_difference=log_rest.exp() - teacher_rest,
    )


def kd_gradient(
    student: Tensor,  # [n, w] bf16/fp32/fp64
    ids: Tensor,  # [n, k]
    teacher: TeacherBuckets,
    merged: MergedTopK,  # of these n rows
    row_weight: Tensor,  # [n] compute dtype, derivative of the final scalar by a row's KL
    shard: VocabShard,
    objective: KDObjective,
) -> Tensor:
    """Return row_weight * dKL/d logits, [n, shard.shared] compute dtype, a new tensor; 0 beyond."""
    if shard.shared == 0:
        return row_weight.new_zeros(student.shape[0], 0)
    temperature = objective.temperature
    own, index = _locate(ids, shard.start, shard.shared)
    result = _with_spare_column(student[:, : shard.shared])
    at_ids = result.gather(1, index)
    result.sub_(merged.rest_maximum[:, None]).div_(temperature).sub_(merged.rest_log_norm[:, None]).exp_()
    result.mul_(merged.rest_difference[:, None])  # may overflow at the teacher's ids, which are replaced next
    p_s = ((at_ids - merged.set_maximum[:, None]) / temperature - merged.set_log_norm[:, None]).exp()
    result.scatter_(1, index, torch.where(own, p_s - teacher.p, 0.0))
    return result[:, :-1].mul_((row_weight / temperature)[:, None])


def ce_statistics(student: Tensor, labels: Tensor, shard: VocabShard) -> dict[str, Tensor]:
    """Return named [n] statistics of the cross entropy at T = 1, from logits [n, w] and labels [n]."""
    logits = real_columns(student, shard.student)
    own, index = _locate(labels[:, None], shard.start, shard.student)
    maximum = logits.amax(dim=1)
    label = logits.gather(1, index.masked_fill(~own, 0)).masked_fill_(~own, float("-inf")).squeeze(1)
    return {"ce_max": maximum, "ce_sum": (logits - maximum[:, None]).exp_().sum(dim=1), "ce_label": label}


def ce_gradient(
    student: Tensor,  # [n, w]
    labels: Tensor,  # [n]
    merged: Normaliser,  # of all rows, T = 1
    rows: slice,  # those of the n rows
    row_weight: Tensor,  # [n] compute dtype
    shard: VocabShard,
) -> Tensor:
    """Return row_weight * (softmax - one-hot), [n, shard.student] compute dtype, a new tensor; 0 beyond."""
    if shard.student == 0:
        return row_weight.new_zeros(student.shape[0], 0)
    _, index = _locate(labels[:, None], shard.start, shard.student)
    result = _with_spare_column(student[:, : shard.student])
    result.sub_(merged.maximum[rows, None]).sub_(merged.log_sum[rows, None]).exp_()
    result.scatter_add_(1, index, result.new_full(index.shape, -1.0))
    return result[:, :-1].mul_(row_weight[:, None])


def _locate(ids: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Return (mask [n, k] of this shard's ids, local columns [n, k] int64, the spare one for the others)."""
    index = ids.long() - start
    own = (index >= 0) & (index < count)
    return own, index.masked_fill(~own, max(count, 1))


def _with_spare_column(logits: Tensor) -> Tensor:
    """Return a copy [n, c + 1] in the compute dtype; the last column takes the entries of other shards."""
    copy = logits.new_zeros(logits.shape[0], logits.shape[1] + 1, dtype=compute_dtype(logits))
    copy[:, :-1] = logits
    return copy
