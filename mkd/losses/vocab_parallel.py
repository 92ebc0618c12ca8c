"""Cross entropy + distillation on logits that are split over the vocabulary.

Communication: forward, one all-gather of [k, n] row statistics over the tensor-parallel group (k <= 13, n rows), and for
`jsd` one all-reduce of [2, n]; backward, none. The loss is replicated: each rank's backward gives the gradient of its own
columns, with no factor of the group's size. Nothing waits for the device.

Memory: both logits are kept until backward (the teacher's too: they are the target). Temporaries are a few row chunks,
never a [n, w] tensor in the compute dtype. Chunks are looped over inside one autograd node: under autograd every
slice's backward would rebuild a full-size gradient.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mkd.losses.kd_objective import KDObjective, KDOutput, VocabShard
from mkd.losses.rows import passes_for, row_losses
from mkd.losses.softmax import compute_dtype
from mkd.losses.statistics import weighted_sums


def vocab_parallel_kd(
    student_logits: Tensor,  # [..., w] bf16/fp32/fp64, this rank's columns of the padded vocabulary
    teacher_logits: Tensor | None,  # [..., w], same shape and columns, frozen; not read when kd_ratio is 0
    labels: Tensor,  # [...] int64, global vocabulary ids; any value where the mask is 0
    loss_mask: Tensor,  # [...] float or bool, weight of each row; 0 = no loss
    *,
    tp_group: dist.ProcessGroup | None,  # None: the vocabulary is not split
    student_vocab_size: int,
    teacher_vocab_size: int | None = None,
    kd_ratio: float = 0.5,
    temperature: float = 1.0,
    temperature_scaling: str = "squared",
    divergence: str = "forward_kl",
    jsd_beta: float = 0.5,
    mixed_kl_weight: float = 0.5,
    with_ce_metric: bool = False,
    overwrite_student_logits: bool = False,
) -> KDOutput:
    """Sum over rows of `mask * [(1 - r) CE + r s(T) KD]`, differentiable by the student's logits, and metric sums.

    CE is over the student's real ids at T = 1. KD is over the ids that both models have, the first
    `min(student_vocab_size, teacher_vocab_size)`, both distributions renormalised there. The sizes are REAL rows;
    columns beyond are padding: never read, gradient zero. Both models are padded to one width: an id is on one rank.

    Rows with mask 0 add exactly zero to every sum and to the gradient, whatever their logits and labels hold. Loss rows
    need finite logits; a label that is no real id of the student makes `ce` infinite. With kd_ratio 1 CE is computed
    only if `with_ce_metric`. The caller normalises: multiply `loss` by a 0-dim tensor 1 / (global count).

    The gradient has the student's dtype; `overwrite_student_logits=True` writes it over the logits' storage (where they
    are contiguous), for callers that read them no more. A second backward through that graph then raises.

    Raises UsageError for values that make no loss (see `KDObjective`) or a missing teacher.
    """
    objective = KDObjective.of(
        student_vocab_size,
        teacher_vocab_size,
        kd_ratio,
        temperature,
        temperature_scaling,
        divergence,
        jsd_beta,
        mixed_kl_weight,
        with_ce_metric,
    )
    objective.require_teacher(None not in (teacher_logits, teacher_vocab_size))
    teacher = teacher_logits if objective.uses_teacher else None
    _check_shapes(student_logits, teacher, labels, loss_mask)
    width = student_logits.shape[-1]
    loss, sums = _VocabParallelKD.apply(
        student_logits.reshape(-1, width),
        None if teacher is None else teacher.reshape(-1, width),
        labels.reshape(-1),
        loss_mask.reshape(-1).to(compute_dtype(student_logits)),
        VocabShard.of_group(width, tp_group, objective),
        objective,
        tp_group,
        overwrite_student_logits,
    )
    return KDOutput(loss=loss, **sums)


def _check_shapes(student: Tensor, teacher: Tensor | None, labels: Tensor, loss_mask: Tensor) -> None:
    rows = student.shape[:-1]
    assert labels.shape == rows, (
        f"labels {tuple(labels.shape)} do not fit student logits {tuple(student.shape)}"
    )
    assert loss_mask.shape == rows, f"loss_mask {tuple(loss_mask.shape)} does not fit {tuple(student.shape)}"
    if teacher is not None:
        assert teacher.shape == student.shape, (
            f"teacher logits {tuple(teacher.shape)} and student logits {tuple(student.shape)} differ: "
            "pad both LM heads to the same vocabulary width"
        )
        assert not teacher.requires_grad, "the teacher is frozen: compute its logits under no_grad"


class _VocabParallelKD(torch.autograd.Function):
    """([n, w], [n, w] | None, [n], [n], ...) -> (loss, other fields of `KDOutput`)."""

    @staticmethod
    def forward(ctx, student, teacher, labels, loss_mask, shard, objective, tp_group, overwrite):
        merged = row_losses(student, teacher, labels, loss_mask, shard, objective, tp_group)
        ctx.save_for_backward(student, teacher, labels, loss_mask)
        ctx.merged, ctx.shard, ctx.objective, ctx.overwrite = merged, shard, objective, overwrite
        return weighted_sums(merged, loss_mask, objective)

    @staticmethod
    @once_differentiable
    def backward(ctx, loss_gradient, _):
        student, teacher, labels, loss_mask = ctx.saved_tensors
        result = student.detach() if ctx.overwrite else torch.empty_like(student)
        weights = loss_mask, loss_mask * loss_gradient
        write_gradient = passes_for(student).write_gradient
        write_gradient(result, student, teacher, labels, *weights, ctx.merged, ctx.shard, ctx.objective)
        return result, None, None, None, None, None, None, None
