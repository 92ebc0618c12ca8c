"""Cross entropy + distillation from stored top-k log-probabilities, on logits split over the vocabulary.

Communication: forward, one all-gather of [10, n] row statistics over the tensor-parallel group; backward,
none. Memory: the student's logits are kept until backward; temporaries are a few blocks of rows and [n, k]
tensors, never [n, w] in the compute dtype. Nothing waits for the device.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.errors import UsageError
from mkd.losses.differentiable_once import differentiable_once
from mkd.losses.kd_objective import KDObjective, KDOutput, VocabShard, require_columns
from mkd.losses.softmax import Normaliser, compute_dtype
from mkd.losses.statistics import gather_statistics
from mkd.losses.stored.topk_statistics import (
    TeacherBuckets,
    ce_gradient,
    ce_statistics,
    kd_gradient,
    kd_statistics,
    merge_kd,
)
from mkd.losses.torch_rows import row_blocks
from mkd.parallel.axes import place_in


def vocab_parallel_topk_kd(
    student_logits: Tensor,  # [..., w] bf16/fp32/fp64, this rank's columns of the padded vocabulary
    teacher_ids: Tensor | None,  # [..., k] int, distinct, below both real sizes; not read at kd_ratio 0
    teacher_logprobs: Tensor | None,  # [..., k] float, log-probabilities of these ids at `temperature`
    labels: Tensor,  # [...] int64, global vocabulary ids; any value where the mask is 0
    loss_mask: Tensor,  # [...] float or bool, weight of each row; 0 = no loss
    objective: KDObjective,  # its divergence counts as forward KL, its temperature is that of the export
    *,
    tp_group: dist.ProcessGroup | None,  # None: the vocabulary is not split
    teacher_metrics: Tensor | None = None,  # [..., 2] float, the teacher's cross entropy and entropy
    overwrite_student_logits: bool = False,
) -> KDOutput:
    """Do as `vocab_parallel_kd`, with forward KL over k + 1 buckets: the teacher's ids, and the rest.

    The rest bucket holds all other shared ids. KD is never negative, at most the full forward KL, and equal
    to it where the ids are the whole shared vocabulary; see `topk_statistics` for the formulas. The
    log-probabilities belong to the temperature of their export: the mass of the rest bucket at another
    temperature does not follow from them. CE is over the student's real ids at T = 1.

    Rows with mask 0 add exactly zero to every sum and to the gradient, whatever their logits, ids and labels
    hold. Raises UsageError for a missing teacher.
    """
    ids, logprobs = _teacher_rows(objective, teacher_ids, teacher_logprobs, student_logits.shape[:-1])
    width = student_logits.shape[-1]
    mask = loss_mask.reshape(-1).to(compute_dtype(student_logits))
    tensors = student_logits.reshape(-1, width), ids, logprobs, labels.reshape(-1), mask
    settings = _shard(width, tp_group, objective), objective, tp_group, overwrite_student_logits
    loss, sums = _VocabParallelTopKKD.apply(*tensors, *settings)
    ce = entropy = None
    if teacher_metrics is not None:
        ce, entropy = teacher_metrics.reshape(-1, 2).to(mask.dtype).unbind(dim=1)
    return KDOutput(loss=loss, teacher_ce=_total(ce, mask), teacher_entropy=_total(entropy, mask), **sums)


def _teacher_rows(
    objective: KDObjective, ids: Tensor | None, logprobs: Tensor | None, rows: torch.Size
) -> tuple[Tensor | None, Tensor | None]:
    """Return both as [n, k]; None if the objective has no teacher."""
    if not objective.uses_teacher:
        return None, None
    if ids is None or logprobs is None:
        raise UsageError(
            f"kd-ratio is {objective.kd_ratio} but there are no ids or log-probabilities of a teacher",
            "the divergence compares the student with the teacher",
            "give the loss a teacher, or set kd-ratio to 0",
            code="model-missing",
        )
    assert ids.shape == logprobs.shape and ids.shape[:-1] == rows, (ids.shape, logprobs.shape, rows)
    assert 0 < ids.shape[-1] <= objective.num_shared_ids, "more ids than both models have"
    return ids.reshape(-1, ids.shape[-1]), logprobs.reshape(-1, ids.shape[-1])


def _shard(width: int, tp_group: dist.ProcessGroup | None, objective: KDObjective) -> VocabShard:
    rank, size = place_in(tp_group)
    require_columns("student_vocab_size", objective.student_vocab_size, width * size)
    return VocabShard.of(width, rank, size, objective)


class _VocabParallelTopKKD(torch.autograd.Function):
    """([n, w], [n, k], [n, k], [n], [n], ...) -> (loss, other fields of `KDOutput`), in blocks of rows."""

    @staticmethod
    def forward(ctx, student, ids, logprobs, labels, loss_mask, shard, objective, tp_group, overwrite):
        blocks = []
        for rows in row_blocks(student):
            block = {}
            if objective.uses_teacher:
                teacher = TeacherBuckets.of(logprobs[rows], loss_mask.dtype, objective)
                block |= kd_statistics(student[rows], ids[rows], teacher, shard, objective)
            if objective.measures_ce:
                block |= ce_statistics(student[rows], labels[rows], shard)
            blocks.append(block)
        local = torch.cat([torch.stack(list(block.values())) for block in blocks], dim=1)
        gathered = dict(zip(blocks[0], gather_statistics(local, tp_group).unbind(dim=1), strict=True))
        ctx.kd = ctx.ce = None
        values: dict[str, Tensor | None] = {"ce": None, "kd": None, "top1_agreement": None}
        if objective.uses_teacher:
            ctx.kd = merge_kd(gathered, objective)
            values |= {"kd": objective.scale * ctx.kd.value, "top1_agreement": ctx.kd.top1_agreement}
        if objective.measures_ce:
            ctx.ce = Normaliser.merge(gathered["ce_max"], gathered["ce_sum"], 1.0)
            values["ce"] = ctx.ce.log_sum - (gathered["ce_label"].amax(dim=0) - ctx.ce.maximum)
        ctx.save_for_backward(student, ids, logprobs, labels, loss_mask)
        ctx.shard, ctx.objective, ctx.overwrite = shard, objective, overwrite
        sums = {name: _total(value, loss_mask) for name, value in values.items()}
        sums["num_loss_tokens"] = (loss_mask != 0).sum()
        return objective.mixed(sums["ce"], sums["kd"]), sums

    @staticmethod
    @differentiable_once
    def backward(ctx, loss_gradient, _):
        student, ids, logprobs, labels, loss_mask = ctx.saved_tensors
        shard, objective, ratio = ctx.shard, ctx.objective, ctx.objective.kd_ratio
        row_weight = loss_mask * loss_gradient
        no_loss = (loss_mask == 0)[:, None]
        result = student.detach() if ctx.overwrite else torch.empty_like(student)
        for rows in row_blocks(student):
            block = torch.zeros(student[rows].shape, dtype=loss_mask.dtype, device=student.device)
            if objective.uses_teacher:
                teacher = TeacherBuckets.of(logprobs[rows], loss_mask.dtype, objective)
                weight = row_weight[rows] * (ratio * objective.scale)
                part = student[rows], ids[rows], teacher, ctx.kd.rows(rows), weight
                kd = kd_gradient(*part, shard, objective)
                block[:, : kd.shape[1]] += kd
            if objective.uses_ce:
                weight = row_weight[rows] * (1.0 - ratio)
                ce = ce_gradient(student[rows], labels[rows], ctx.ce, rows, weight, shard)
                block[:, : ce.shape[1]] += ce
            # A weight of zero is not enough: a masked row may hold NaN.
            result[rows] = block.masked_fill_(no_loss[rows], 0.0)
        return result, None, None, None, None, None, None, None, None


def _total(values: Tensor | None, loss_mask: Tensor) -> Tensor | None:
    """Sum over rows [n], weighted by the mask; the contents of masked rows do not count."""
    return None if values is None else torch.where(loss_mask != 0, loss_mask * values, 0.0).sum()
