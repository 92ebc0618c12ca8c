"""LM heads and distillation loss in one: hidden states x heads, chunk by chunk, so that no [t, v] tensor ever exists.

For every chunk of loss rows: both heads' logits, row statistics, one all-gather, the gradient over the student's logits,
and from it the gradients of hidden states and head weight. All of that in the forward pass: the backward pass only hands
the results on. So logits are made once (recomputing them in backward would cost 1.6 times the operations), and rows
without loss cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

from mkd.losses.kd_objective import KDObjective, KDOutput, VocabShard
from mkd.losses.mixture import mixture_logits
from mkd.losses.rows import passes_for, row_losses
from mkd.losses.softmax import compute_dtype
from mkd.losses.statistics import MergedStatistics, weighted_sums
from mkd.plan.head import head_chunk_rows


def fused_linear_kd(
    student_hidden: Tensor,  # [t, h_s] final hidden states; [t/tp, h_s] with sequence_parallel
    student_weight: Tensor,  # [w, h_s] this rank's rows of the padded LM head
    teacher_hidden: Tensor
    | Sequence[Tensor]
    | None,  # [t, h_t] (or [t/tp, h_t]), frozen; None when kd_ratio is 0
    teacher_weight: Tensor | Sequence[Tensor] | None,  # [w, h_t]
    labels: Tensor,  # [t] int64, global vocabulary ids; any value where the mask is 0
    loss_mask: Tensor,  # [t] float or bool, weight of each row
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
    loss_rows: Tensor | None = None,  # [n] int64, the rows with a non-zero mask; None: all rows are computed
    sequence_parallel: bool = False,
    loss_gradient: Tensor | None = None,  # 0-dim
    chunk_rows: int | None = None,
    fp32_logits: bool = False,
    teacher_shares: Sequence[float] = (1.0,),  # of several teachers, adding up to 1
) -> KDOutput:
    """`vocab_parallel_kd` of `hidden @ weight.T`, differentiable by the student's hidden states and head.

    Same values, same arguments where the names are the same. Logits have the dtype of the hidden states, or fp32 with
    `fp32_logits` (bf16 logits put an error of about 3e-2 into the gradients, fp32 ones 2e-3). Several teachers count as one,
    the weighted mean of their probabilities (see `mixture.py`); their `teacher_vocab_size` is the smallest. Memory beyond
    the gradients: two chunks of logits, [chunk_rows, w] each.

    `loss_gradient` is the number that the caller multiplies `loss` by before backward (1 / tokens, say). When it is given,
    gradients are final in the forward pass, and a weight that has `main_grad` (fp32, Megatron's DDP) gets its gradient added
    there; a backward with another factor fails. Without it gradients are scaled in backward and returned by autograd.

    Communication over the tensor-parallel group: per chunk one all-gather of row statistics (and for `jsd` one all-reduce);
    for the hidden states an all-gather of the sequence in forward and a reduce-scatter of the gradient in backward with
    `sequence_parallel`, else an all-reduce in backward. In evaluation (no_grad) it stops after the statistics.
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
    objective.require_teacher(None not in (teacher_hidden, teacher_weight, teacher_vocab_size))
    rows = labels.shape[0] if loss_rows is None else loss_rows.shape[0]
    shard = VocabShard.of_group(student_weight.shape[0], tp_group, objective)
    dtype = compute_dtype(student_hidden) if fp32_logits else student_hidden.dtype
    chunk_rows = chunk_rows or head_chunk_rows(rows, student_weight.shape[0], dtype.itemsize, labels.is_cuda)
    head = _Head(
        objective, shard, tp_group, _chunks(rows, chunk_rows), torch.is_grad_enabled(), loss_gradient, dtype
    )
    student_hidden = whole_sequence(student_hidden, tp_group, sequence_parallel)
    teachers: list[tuple[Tensor, Tensor]] = []
    if objective.uses_teacher:
        teachers = _whole_teachers(teacher_hidden, teacher_weight, tp_group, sequence_parallel)
        assert [len(weight) for _, weight in teachers] == [len(student_weight)] * len(teacher_shares), (
            "heads of one width"
        )
    assert student_hidden.shape[:1] == labels.shape == loss_mask.shape, (
        "hidden states, labels and mask are of one row"
    )
    tensors = student_hidden, student_weight, labels, loss_mask.to(compute_dtype(student_hidden)), loss_rows
    loss, sums = _FusedLinearKD.apply(*tensors, teachers, teacher_shares, head)
    return KDOutput(loss=loss, **sums)


def whole_sequence(hidden: Tensor, tp_group: dist.ProcessGroup | None, sequence_parallel: bool) -> Tensor:
    """[t, h] on every rank. Backward: reduce-scatter over the sequence, or all-reduce SUM where nothing was split."""
    if tp_group is None or dist.get_world_size(tp_group) == 1:
        return hidden
    if sequence_parallel:
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=tp_group)
    return copy_to_tensor_model_parallel_region(hidden, group=tp_group)


@torch.no_grad()
def _whole_teachers(
    hidden: Tensor | Sequence[Tensor], weight: Tensor | Sequence[Tensor], tp_group, sequence_parallel: bool
) -> list[tuple[Tensor, Tensor]]:
    """([t, h], [w, h]) of each teacher."""
    pairs = [(hidden, weight)] if isinstance(hidden, Tensor) else zip(hidden, weight, strict=True)
    return [(whole_sequence(states, tp_group, sequence_parallel), head) for states, head in pairs]


def _chunks(rows: int, size: int) -> list[slice]:
    """Slices of `size` rows that cover all; at least one, empty where there is no row."""
    return [slice(first, min(first + size, rows)) for first in range(0, max(rows, 1), size)]


@dataclass(frozen=True)
class _Head:
    """What one call works with, beside its tensors."""

    objective: KDObjective
    shard: VocabShard
    tp_group: dist.ProcessGroup | None
    chunks: list[slice]
    with_gradient: bool
    loss_gradient: Tensor | None
    logits_dtype: torch.dtype

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return head_logits(hidden, weight, self.logits_dtype)

    def teacher_logits(
        self, teachers: Sequence[tuple[Tensor, Tensor]], shares: Sequence[float], rows: Tensor | slice
    ) -> Tensor | None:
        """[n, w] of the teacher, or of several as one."""
        logits = (self.logits(hidden[rows], weight) for hidden, weight in teachers)
        if len(teachers) < 2:
            return next(logits, None)
        return mixture_logits(logits, shares, self.objective.temperature, self.shard.shared, self.tp_group)

    def row_losses(
        self, student: Tensor, teacher: Tensor | None, labels: Tensor, mask: Tensor
    ) -> MergedStatistics:
        return row_losses(student, teacher, labels, mask, self.shard, self.objective, self.tp_group)

    def logit_gradient(
        self,
        dtype: torch.dtype,
        student: Tensor,
        teacher: Tensor | None,
        labels: Tensor,
        mask: Tensor,
        merged: MergedStatistics,
    ) -> Tensor:
        """[n, w] in `dtype`, over the student's logits where that is their dtype."""
        result = student if student.dtype == dtype else torch.empty_like(student, dtype=dtype)
        weight = mask if self.loss_gradient is None else mask * self.loss_gradient
        write_gradient = passes_for(student).write_gradient
        write_gradient(result, student, teacher, labels, mask, weight, merged, self.shard, self.objective)
        return result


def head_logits(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, h], [w, h] -> [n, w] in `dtype`."""
    if dtype == hidden.dtype:
        return torch.mm(hidden, weight.t())
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=dtype)
    return torch.mm(hidden.to(dtype), weight.t().to(dtype))


class HeadGradients:
    """Gradients of hidden states and head weight, summed up chunk by chunk in forward, handed on in backward."""

    def __init__(self, hidden: Tensor, weight: Tensor, compacted: bool, into_main_grad: bool):
        self.weight = weight
        self.in_main_grad = (
            into_main_grad and weight.requires_grad and getattr(weight, "main_grad", None) is not None
        )
        self.hidden = (torch.zeros_like if compacted else torch.empty_like)(hidden)
        self.of_weight = None
        if self.in_main_grad:
            self.of_weight = weight.main_grad
        elif weight.requires_grad:
            self.of_weight = torch.zeros_like(weight, dtype=compute_dtype(weight))

    def add(self, rows: Tensor | slice, hidden: Tensor, logit_gradient: Tensor) -> None:
        """One chunk: `rows` of the sequence, their hidden states [n, h], their logits' gradient [n, w]."""
        self.hidden[rows] = torch.mm(logit_gradient, self.weight)
        if self.of_weight is not None:
            add_product(self.of_weight, logit_gradient.t(), hidden)

    def finish(self, loss_gradient: Tensor, announced: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(hidden states', weight's) for autograd, times `loss_gradient` unless it was `announced` and is in them already."""
        hidden, weight = self.hidden, self.for_weight()
        if announced is None:
            hidden.mul_(loss_gradient)
            weight = None if weight is None else weight.mul_(loss_gradient)
        else:
            torch._assert_async(loss_gradient == announced)
        return hidden, weight if weight is None else weight.to(self.weight.dtype)

    def for_weight(self) -> Tensor | None:
        """What autograd gets for the weight; Megatron's DDP wants something for a weight whose gradient it has already."""
        if not self.in_main_grad:
            return self.of_weight
        if getattr(self.weight, "zero_out_wgrad", False):
            return torch.zeros_like(
                self.weight
            )  # tied: the embedding's own gradient comes on top, DDP adds the sum
        self.weight.grad_added_to_main_grad = True  # so DDP does not look at the values
        return torch.empty_like(self.weight)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, accumulated in the dtype of `total` (fp32 for bf16 factors)."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


class _FusedLinearKD(torch.autograd.Function):
    """([t, h_s], [w, h_s], [t], [t], [n] | None, [([t, h_t], [w, h_t])], shares, _Head) -> (loss, rest of `KDOutput`)."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, loss_mask, loss_rows, teachers, shares, head):
        gradients = None
        if head.with_gradient:
            gradients = HeadGradients(hidden, weight, loss_rows is not None, head.loss_gradient is not None)
        loss, sums = 0.0, {}
        for chunk in head.chunks:
            rows = chunk if loss_rows is None else loss_rows[chunk]
            own, label, mask = hidden[rows], labels[rows], loss_mask[rows]
            student = head.logits(own, weight)
            teacher = head.teacher_logits(teachers, shares, rows)
            merged = head.row_losses(student, teacher, label, mask)
            chunk_loss, chunk_sums = weighted_sums(merged, mask, head.objective)
            loss = loss + chunk_loss
            sums = {name: None if v is None else v + sums.get(name, 0) for name, v in chunk_sums.items()}
            if gradients is not None:
                gradient = head.logit_gradient(hidden.dtype, student, teacher, label, mask, merged)
                gradients.add(rows, own, gradient)
                del gradient
            del student, teacher  # before the next chunk's logits are made
        ctx.gradients, ctx.loss_gradient = gradients, head.loss_gradient
        return loss, sums

    @staticmethod
    @once_differentiable
    def backward(ctx, loss_gradient, _):
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "gradients were made in forward, for one backward"
        hidden, weight = gradients.finish(loss_gradient, ctx.loss_gradient)
        return hidden, weight, None, None, None, None, None, None
