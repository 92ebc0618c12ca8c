"""LM heads and distillation loss in one, block by block, so that no [t, v] tensor ever exists.

For every block of loss rows: both heads' logits, row statistics, one all-gather, and the gradient over the
student's logits. From that follow the gradients of hidden states and head weight. All of it happens in the
forward pass; the backward pass only returns the results. So logits are made once (recomputing them in
backward would cost 1.6 times the operations), and rows without loss cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor
from torch.autograd.function import once_differentiable

from mkd.losses.kd_objective import KDObjective, KDOutput, LossRows, VocabShard
from mkd.losses.softcap import softcap, softcap_and_tanh, through_softcap
from mkd.losses.softmax import compute_dtype
from mkd.losses.statistics import MergedStatistics, weighted_sums
from mkd.losses.vocab_parallel import passes_for, row_losses
from mkd.parallel.axes import place_in
from mkd.plan.footprint.head import head_block_rows


class HeadInput(NamedTuple):
    """Final hidden states of one model and its LM head."""

    hidden: Tensor  # [t, h] final hidden states; [t/tp, h] with sequence_parallel
    weight: Tensor  # [w, h] this rank's rows of the padded LM head
    logits_cap: float | None = None  # see `softcap`


def fused_linear_kd(
    student: HeadInput,
    teachers: Sequence[HeadInput],  # frozen, heads as wide as the student's; several count as one
    labels: Tensor,  # [t] int64, global vocabulary ids; any value where the mask is 0
    loss_mask: Tensor,  # [t] float or bool, weight of each row
    objective: KDObjective,  # of several teachers: with the smallest of their vocabularies
    *,
    tp_group: dist.ProcessGroup | None,  # None: the vocabulary is not split
    teacher_shares: Sequence[float] = (1.0,),  # weights of several teachers, adding up to 1
    loss_rows: Tensor | None = None,  # [n] int64, the rows with a non-zero mask; None: all rows are computed
    sequence_parallel: bool = False,
    loss_gradient: Tensor | None = None,  # 0-dim
    block_rows: int | None = None,
    fp32_logits: bool = False,
) -> KDOutput:
    """Compute `vocab_parallel_kd` of `hidden @ weight.T`, differentiable by the student's hidden and weight.

    Logits have the dtype of the hidden states, or fp32 with `fp32_logits`. bf16 logits put an error of about
    3e-2 into the gradients, fp32 ones 2e-3. Several teachers count as the weighted mean of their
    probabilities (see `mixture_logits`). Memory beyond the gradients: two blocks of logits, [block_rows, w]
    each; three if the student's logits are soft-capped.

    `loss_gradient` is the number that the caller multiplies `loss` by before backward (1 / tokens, say). If
    it is given, gradients are final in the forward pass. A weight that has `main_grad` (fp32, Megatron's DDP)
    then gets its gradient added there. A backward with another factor fails. Without `loss_gradient`,
    gradients are scaled in backward and returned by autograd.

    Communication over the tensor-parallel group: per block one all-gather of row statistics (and one
    all-reduce for a divergence that needs a second pass). For the hidden states: with `sequence_parallel` an
    all-gather of the sequence in forward and a reduce-scatter of the gradient in backward, else an all-reduce
    in backward. In evaluation (no_grad) it stops after the statistics. Raises UsageError if the objective
    needs a teacher and there is none.
    """
    objective.require_teacher(len(teachers) > 0)
    rows, width = labels.shape[0] if loss_rows is None else loss_rows.shape[0], student.weight.shape[0]
    shard = VocabShard.of_group(width, tp_group, objective)
    dtype = compute_dtype(student.hidden) if fp32_logits else student.hidden.dtype
    block_rows = block_rows or head_block_rows(rows, width, dtype.itemsize, labels.is_cuda)
    blocks, with_gradient = _blocks(rows, block_rows), torch.is_grad_enabled()
    head = _Head(objective, shard, tp_group, blocks, with_gradient, loss_gradient, dtype)
    hidden = whole_sequence(student.hidden, tp_group, sequence_parallel)
    whole = _whole_teachers(teachers, tp_group, sequence_parallel) if objective.uses_teacher else []
    if whole:
        assert [len(one.weight) for one in whole] == [width] * len(teacher_shares), "heads of one width"
    assert hidden.shape[:1] == labels.shape == loss_mask.shape, "one length of hidden states, labels, mask"
    tensors = hidden, student.weight, labels, loss_mask.to(compute_dtype(hidden)), loss_rows
    cap = student.logits_cap
    loss, sums = _FusedLinearKD.apply(*tensors, whole, teacher_shares, head, cap)
    return KDOutput(loss=loss, **sums)


def whole_sequence(hidden: Tensor, tp_group: dist.ProcessGroup | None, sequence_parallel: bool) -> Tensor:
    """Return [t, h] on every rank; backward: reduce-scatter, or all-reduce SUM if nothing was split."""
    if tp_group is None or dist.get_world_size(tp_group) == 1:
        return hidden
    if sequence_parallel:
        gather = tensor_parallel.gather_from_sequence_parallel_region
        return gather(hidden, tensor_parallel_output_grad=True, group=tp_group)
    return tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=tp_group)


@torch.no_grad()
def _whole_teachers(
    teachers: Sequence[HeadInput], tp_group: dist.ProcessGroup | None, sequence_parallel: bool
) -> list[HeadInput]:
    return [one._replace(hidden=whole_sequence(one.hidden, tp_group, sequence_parallel)) for one in teachers]


def _blocks(rows: int, size: int) -> list[slice]:
    """Return slices of `size` rows that cover all rows: at least one, empty if there is no row."""
    return [slice(first, min(first + size, rows)) for first in range(0, max(rows, 1), size)]


@dataclass(frozen=True)
class _Head:
    """The settings of one call."""

    objective: KDObjective
    shard: VocabShard
    tp_group: dist.ProcessGroup | None
    blocks: list[slice]
    with_gradient: bool
    loss_gradient: Tensor | None
    logits_dtype: torch.dtype

    def teacher_logits(
        self, teachers: Sequence[HeadInput], shares: Sequence[float], rows: Tensor | slice
    ) -> Tensor | None:
        """Return the logits [n, w] of the teacher, or of several as one; None without a teacher."""
        dtype = self.logits_dtype
        logits = (head_logits(one.hidden[rows], one.weight, dtype, one.logits_cap) for one in teachers)
        if len(teachers) < 2:
            return next(logits, None)
        return mixture_logits(logits, shares, self.objective.temperature, self.shard.shared, self.tp_group)

    def logit_gradient(self, dtype: torch.dtype, data: LossRows, merged: MergedStatistics) -> Tensor:
        """Return the gradient [n, w] in `dtype`, written over the student's logits if they have it."""
        student = data.student
        result = student if student.dtype == dtype else torch.empty_like(student, dtype=dtype)
        weight = data.mask if self.loss_gradient is None else data.mask * self.loss_gradient
        write_gradient = passes_for(student, self.objective).write_gradient
        write_gradient(result, data, weight, merged, self.shard, self.objective)
        return result


def head_logits(hidden: Tensor, weight: Tensor, dtype: torch.dtype, logits_cap: float | None) -> Tensor:
    """Return the logits [n, w] in `dtype` of hidden [n, h] and weight [w, h]; see `softcap`."""
    return softcap(head_product(hidden, weight, dtype), logits_cap)


def head_product(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return hidden [n, h] @ weight [w, h] transposed, [n, w] in `dtype`."""
    if dtype == hidden.dtype:
        return torch.mm(hidden, weight.t())
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=dtype)
    return torch.mm(hidden.to(dtype), weight.t().to(dtype))


class HeadGradients:
    """Gradients of hidden states and head weight, summed block by block in forward, returned in backward."""

    def __init__(self, hidden: Tensor, weight: Tensor, compacted: bool, into_main_grad: bool):
        self.weight = weight
        has_main_grad = getattr(weight, "main_grad", None) is not None
        self.in_main_grad = into_main_grad and weight.requires_grad and has_main_grad
        self.hidden = (torch.zeros_like if compacted else torch.empty_like)(hidden)
        self.of_weight = None
        if self.in_main_grad:
            self.of_weight = weight.main_grad
        elif weight.requires_grad:
            self.of_weight = torch.zeros_like(weight, dtype=compute_dtype(weight))

    def add(self, rows: Tensor | slice, hidden: Tensor, logit_gradient: Tensor) -> None:
        """Add a block: `rows` of the sequence, their hidden states [n, h], their logits' gradient [n, w]."""
        self.hidden[rows] = torch.mm(logit_gradient, self.weight)
        if self.of_weight is not None:
            add_product(self.of_weight, logit_gradient.t(), hidden)

    def finish(self, loss_gradient: Tensor, announced: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the gradients (of hidden states, of the weight), times `loss_gradient`.

        They contain it already if it was `announced`.
        """
        hidden, weight = self.hidden, self.for_weight()
        if announced is None:
            hidden.mul_(loss_gradient)
            weight = None if weight is None else weight.mul_(loss_gradient)
        else:
            torch._assert_async(loss_gradient == announced)
        return hidden, weight if weight is None else weight.to(self.weight.dtype)

    def for_weight(self) -> Tensor | None:
        """Return the weight's gradient for autograd; DDP wants a tensor even if it has the gradient."""
        if not self.in_main_grad:
            return self.of_weight
        if getattr(self.weight, "zero_out_wgrad", False):
            # tied: autograd adds the embedding's gradient, and DDP adds the sum to `main_grad`
            return torch.zeros_like(self.weight)
        self.weight.grad_added_to_main_grad = True  # DDP then ignores the values
        return torch.empty_like(self.weight)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, accumulated in the dtype of `total` (fp32 for bf16 factors)."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def mixture_logits(
    logits: Iterable[Tensor],  # each [n, w], this rank's columns; overwritten if they have the compute dtype
    shares: Sequence[float],  # adding up to 1
    temperature: float,
    real: int,  # number of columns of this rank, its first ones, that are ids of all models
    tp_group: dist.ProcessGroup | None,
) -> Tensor:
    """Return z [n, w] with softmax(z / T) = sum over i of shares[i] * softmax(logits[i] / T).

    So z = T ln(that sum) + a constant of each row, which puts the largest near 0, where rounding is least. z
    has the dtype of the logits. Metrics that read z at T = 1 are those of a sharpened mixture unless T is 1.
    Columns that are not real keep arbitrary values: no loss reads them. Communication: one all-reduce MAX and
    one SUM of [n] for each teacher.
    """
    total = offset = dtype = None
    for one, share in zip(logits, shares, strict=True):
        dtype = one.dtype
        centred, log_sum = _centred(one.to(compute_dtype(one)), temperature, real, tp_group)
        own = math.log(share) - log_sum
        if total is None:
            total, offset = centred, own
            continue
        highest = torch.maximum(offset, own)
        total[:, :real] += offset - highest
        centred[:, :real] += own - highest
        total, offset = torch.logaddexp(total, centred), highest
    return total.mul_(temperature).to(dtype)


def _centred(
    logits: Tensor, temperature: float, real: int, tp_group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return (logits / T - their maximum, ln of the sum of its exponentials [n, 1]).

    Both are over the real columns of all ranks. The first is written over `logits`.
    """
    columns = logits.div_(temperature)[:, :real]
    is_split = place_in(tp_group)[1] > 1
    lowest = torch.finfo(logits.dtype).min
    maximum = columns.amax(dim=1, keepdim=True) if real else logits.new_full((len(logits), 1), lowest)
    if is_split:
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=tp_group)
    total = columns.sub_(maximum).exp().sum(dim=1, keepdim=True)
    if is_split:
        dist.all_reduce(total, group=tp_group)
    return logits, total.log()


class _FusedLinearKD(torch.autograd.Function):
    """([t, h_s], [w, h_s], [t], [t], [n] | None, [HeadInput], ...) -> (loss, rest of `KDOutput`)."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, loss_mask, loss_rows, teachers, shares, head, cap):
        gradients = None
        if head.with_gradient:
            gradients = HeadGradients(hidden, weight, loss_rows is not None, head.loss_gradient is not None)
        loss, sums = 0.0, {}
        for block in head.blocks:
            rows = block if loss_rows is None else loss_rows[block]
            own = hidden[rows]
            student, tanh = softcap_and_tanh(head_product(own, weight, head.logits_dtype), cap)
            teacher = head.teacher_logits(teachers, shares, rows)
            data = LossRows(student, teacher, labels[rows], loss_mask[rows])
            merged = row_losses(data, head.shard, head.objective, head.tp_group)
            block_loss, block_sums = weighted_sums(merged, data.mask, head.objective)
            loss = loss + block_loss
            sums = {name: None if v is None else v + sums.get(name, 0) for name, v in block_sums.items()}
            if gradients is not None:
                gradient = head.logit_gradient(hidden.dtype, data, merged)
                gradients.add(rows, own, through_softcap(gradient, tanh))
                del gradient
            del student, tanh, teacher, data  # before the next block's logits are made
        ctx.gradients, ctx.loss_gradient = gradients, head.loss_gradient
        return loss, sums

    @staticmethod
    @once_differentiable
    def backward(ctx, loss_gradient, _):
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "gradients were made in forward, for one backward"
        hidden, weight = gradients.finish(loss_gradient, ctx.loss_gradient)
        return hidden, weight, None, None, None, None, None, None, None
