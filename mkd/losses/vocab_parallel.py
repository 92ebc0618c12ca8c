"""Cross entropy + distillation on logits that are split over the vocabulary.

Communication in forward: one all-gather of [k, n] row statistics over the tensor-parallel group (k <= 13, n
rows). A divergence that needs a second pass adds one all-reduce of [<= 2, n]. Backward communicates nothing.
The loss is replicated: each rank's backward gives the gradient of its own columns, with no factor of the
group's size. Nothing waits for the device.

Memory: both logits are kept until backward (the teacher's too: they are the target). Temporaries are a few
blocks of rows, never a [n, w] tensor in the compute dtype. One autograd node loops over the blocks: under
autograd every slice's backward would rebuild a full-size gradient.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.losses import torch_rows
from mkd.losses.differentiable_once import differentiable_once
from mkd.losses.divergence_base import Divergence
from mkd.losses.kd_objective import KDObjective, KDOutput, LossRows, VocabShard
from mkd.losses.softmax import compute_dtype
from mkd.losses.statistics import (
    MergedStatistics,
    RowValues,
    add_terms,
    gather_statistics,
    row_values,
    weighted_sums,
)


def vocab_parallel_kd(
    student_logits: Tensor,  # [..., w] bf16/fp32/fp64, this rank's columns of the padded vocabulary
    teacher_logits: Tensor | None,  # [..., w], same shape and columns, frozen; not read if kd_ratio is 0
    labels: Tensor,  # [...] int64, global vocabulary ids; any value where the mask is 0
    loss_mask: Tensor,  # [...] float or bool, weight of each row; 0 = no loss
    objective: KDObjective,
    *,
    tp_group: dist.ProcessGroup | None,  # None: the vocabulary is not split
    overwrite_student_logits: bool = False,
    shard: VocabShard | None = None,  # None: all ranks have as many columns
) -> KDOutput:
    """Sum `mask * [(1 - r) CE + r s(T) KD]` over rows, differentiable by the student's logits.

    CE is over the student's real ids at T = 1. KD is over the ids that both models have, the first
    `min(student_vocab_size, teacher_vocab_size)`, both distributions renormalised there. The sizes are REAL
    rows; columns beyond are padding: never read, gradient zero. Both models are padded to one width, so that
    an id is on one rank.

    Rows with mask 0 add exactly zero to every sum and to the gradient, whatever their logits and labels hold.
    Loss rows need finite logits; a label that is not a real id of the student makes `ce` infinite. With
    kd_ratio 1 CE is computed only if `with_ce_metric`. The caller normalises: multiply `loss` by a 0-dim
    tensor 1 / (global count).

    The gradient has the student's dtype. `overwrite_student_logits=True` writes it over the logits' storage
    (where they are contiguous), for callers that do not read them again. A second backward through that graph
    then raises.

    Raises UsageError if the objective needs a teacher and there is none.
    """
    rows = student_logits, teacher_logits, labels, loss_mask
    loss, sums = _apply(weighted_sums, *rows, objective, tp_group, overwrite_student_logits, shard)
    return KDOutput(loss=loss, **sums)


def vocab_parallel_rows(
    student_logits: Tensor,  # [..., w], and so on as for `vocab_parallel_kd`
    teacher_logits: Tensor | None,
    labels: Tensor,
    loss_mask: Tensor,
    objective: KDObjective,
    *,
    tp_group: dist.ProcessGroup | None,
    overwrite_student_logits: bool = False,
    shard: VocabShard | None = None,
) -> RowValues:
    """Return the values of each row, [n], instead of their sums: the caller may weight rows as it likes."""
    rows = student_logits, teacher_logits, labels, loss_mask
    loss, values = _apply(row_values, *rows, objective, tp_group, overwrite_student_logits, shard)
    return RowValues(loss=loss, **values)


def _apply(
    reduce: Callable[..., tuple[Tensor, dict[str, Tensor | None]]],  # `weighted_sums` or `row_values`
    student_logits: Tensor,
    teacher_logits: Tensor | None,
    labels: Tensor,
    loss_mask: Tensor,
    objective: KDObjective,
    tp_group: dist.ProcessGroup | None,
    overwrite: bool,
    shard: VocabShard | None,
) -> tuple[Tensor, dict[str, Tensor | None]]:
    objective.require_teacher(teacher_logits is not None)
    teacher = teacher_logits if objective.uses_teacher else None
    _check_shapes(student_logits, teacher, labels, loss_mask)
    width = student_logits.shape[-1]
    logits = student_logits.reshape(-1, width), None if teacher is None else teacher.reshape(-1, width)
    rows = labels.reshape(-1), loss_mask.reshape(-1).to(compute_dtype(student_logits))
    shard = shard or VocabShard.of_group(width, tp_group, objective)
    return _VocabParallelKD.apply(*logits, *rows, shard, objective, tp_group, overwrite, reduce)


def _check_shapes(student: Tensor, teacher: Tensor | None, labels: Tensor, loss_mask: Tensor) -> None:
    rows = student.shape[:-1]
    assert labels.shape == rows, f"labels {labels.shape} do not fit student logits {student.shape}"
    assert loss_mask.shape == rows, f"loss_mask {loss_mask.shape} does not fit {student.shape}"
    if teacher is not None:
        shapes = f"teacher logits {teacher.shape} and student logits {student.shape} differ"
        assert teacher.shape == student.shape, f"{shapes}: pad both LM heads to the same vocabulary width"
        assert not teacher.requires_grad, "the teacher is frozen: compute its logits under no_grad"


class _VocabParallelKD(torch.autograd.Function):
    """([n, w], [n, w] | None, [n], [n], shard, objective, ...) -> (loss, what `reduce` adds)."""

    @staticmethod
    def forward(ctx, student, teacher, labels, loss_mask, shard, objective, tp_group, overwrite, reduce):
        merged = row_losses(LossRows(student, teacher, labels, loss_mask), shard, objective, tp_group)
        ctx.save_for_backward(student, teacher, labels, loss_mask)
        ctx.merged, ctx.shard, ctx.objective, ctx.overwrite = merged, shard, objective, overwrite
        return reduce(merged, loss_mask, objective)

    @staticmethod
    @differentiable_once
    def backward(ctx, loss_gradient, _):
        data = LossRows(*ctx.saved_tensors)
        result = data.student.detach() if ctx.overwrite else torch.empty_like(data.student)
        write_gradient = passes_for(data.student, ctx.objective).write_gradient
        write_gradient(result, data, data.mask * loss_gradient, ctx.merged, ctx.shard, ctx.objective)
        return result, None, None, None, None, None, None, None, None


def row_losses(
    data: LossRows, shard: VocabShard, objective: KDObjective, tp_group: dist.ProcessGroup | None
) -> MergedStatistics:
    """Return row values of the whole vocabulary.

    Communication: one all-gather over the tensor-parallel group; for a divergence that needs a second pass
    also one all-reduce SUM of [<= 2, n]. No backward.
    """
    passes = passes_for(data.student, objective)
    local = passes.local_statistics(data, shard, objective)
    merged = passes.merge_statistics(gather_statistics(local, tp_group), shard, objective)
    if objective.uses_teacher and objective.divergence.needs_terms:
        terms = passes.divergence_terms(data, merged, shard, objective)
        if tp_group is not None and dist.get_world_size(tp_group) > 1 and terms.shape[1]:
            dist.all_reduce(terms, group=tp_group)
        merged = add_terms(merged, terms, objective)
    return merged


def passes_for(logits: Tensor, objective: KDObjective) -> ModuleType:
    """Return the module of passes to use, which have the same functions: `torch_rows` or `triton_rows`."""
    if use_triton(logits, objective.divergence if objective.uses_teacher else None):
        from mkd.losses.triton import triton_rows

        return triton_rows
    return torch_rows


def use_triton(logits: Tensor, divergence: Divergence | None) -> bool:
    """Return True if Triton kernels, whose arithmetic is fp32, can compute the divergence on these logits."""
    if not (logits.is_cuda and logits.dtype != torch.float64 and _has_triton()):
        return False
    from mkd.losses.triton.triton_divergences import FORMULAS

    return divergence is None or type(divergence) in FORMULAS


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
