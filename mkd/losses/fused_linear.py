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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.losses.differentiable_once import differentiable_once
from mkd.losses.kd_objective import KDObjective, KDOutput, LossRows, VocabShard
from mkd.losses.lm_head import HeadGradients, HeadInput, whole_sequence
from mkd.losses.softcap import softcap_and_tanh, through_softcap
from mkd.losses.softmax import compute_dtype
from mkd.losses.statistics import MergedStatistics, weighted_sums
from mkd.losses.vocab_parallel import passes_for, row_losses
from mkd.parallel.axes import place_in
from mkd.plan.footprint.head import head_block_rows


def fused_linear_kd(
    student: HeadInput,
    teachers: Sequence[HeadInput],  # frozen; several count as one
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
    shard: VocabShard | None = None,  # None: all ranks have as many rows of the head
) -> KDOutput:
    """Compute `vocab_parallel_kd` of the heads' logits, differentiable by the student's hidden and head.

    Logits have the dtype of the hidden states, or fp32 with `fp32_logits`. bf16 logits put an error of about
    3e-2 into the gradients, fp32 ones 2e-3. A head of another dtype is cast; its gradient has its dtype.
    Several teachers count as the weighted mean of their probabilities (see `mixture_logits`). A teacher's
    head begins at the id at which the student's begins, and has at least the ids that both have. Memory
    beyond the gradients: two blocks of logits, [block_rows, w] each; three if the student's are soft-capped.

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
    call = head_call(
        student,
        teachers,
        objective,
        rows=labels.shape[0] if loss_rows is None else loss_rows.shape[0],
        tp_group=tp_group,
        teacher_shares=teacher_shares,
        loss_rows=loss_rows,
        sequence_parallel=sequence_parallel,
        loss_gradient=loss_gradient,
        block_rows=block_rows,
        fp32_logits=fp32_logits,
        shard=shard,
    )
    hidden = whole_sequence(student.hidden, tp_group, sequence_parallel)
    assert hidden.shape[:1] == labels.shape == loss_mask.shape, "one length of hidden states, labels, mask"
    tensors = hidden, student.weight, student.bias, labels, loss_mask.to(compute_dtype(hidden))
    loss, sums = _FusedLinearKD.apply(*tensors, call)
    return KDOutput(loss=loss, **sums)


def head_call(
    student: HeadInput,
    teachers: Sequence[HeadInput],
    objective: KDObjective,
    *,
    rows: int,  # rows that are computed
    tp_group: dist.ProcessGroup | None,
    teacher_shares: Sequence[float] = (1.0,),
    loss_rows: Tensor | None,
    sequence_parallel: bool = False,
    loss_gradient: Tensor | None = None,
    block_rows: int | None,
    fp32_logits: bool,
    shard: VocabShard | None,
) -> HeadCall:
    """Return the settings and the teachers of one call; see `fused_linear_kd`."""
    objective.require_teacher(len(teachers) > 0)
    width = student.weight.shape[0]
    if shard is None:  # then rows of all heads lie alike on the processes
        is_split = tp_group is not None and tp_group.size() > 1
        assert not is_split or all(len(one.weight) == width for one in teachers), "heads are cut alike"
        shard = VocabShard.of_group(width, tp_group, objective)
    dtype = compute_dtype(student.hidden) if fp32_logits else student.hidden.dtype
    block_rows = block_rows or head_block_rows(rows, width, dtype.itemsize, student.hidden.is_cuda)
    trained = any(one is not None and one.requires_grad for one in student[:2] + (student.bias,))
    whole = []
    if objective.uses_teacher:
        assert len(teachers) == len(teacher_shares), "a share for each teacher"
        whole = [_whole_teacher(one, width, tp_group, sequence_parallel) for one in teachers]
        assert all(len(one.weight) >= shard.shared for one in whole), "a teacher's head has the shared ids"
    return HeadCall(
        objective, shard, tp_group, _blocks(rows, block_rows), loss_rows, student, whole, teacher_shares,
        torch.is_grad_enabled() and trained, loss_gradient, dtype,
    )  # fmt: skip


@torch.no_grad()
def _whole_teacher(
    teacher: HeadInput, width: int, tp_group: dist.ProcessGroup | None, sequence_parallel: bool
) -> HeadInput:
    """Return the teacher's head, cut to `width` ids, and its hidden states of the whole sequence."""
    hidden = teacher.hidden
    if not teacher.is_compact:
        hidden = whole_sequence(hidden, tp_group, sequence_parallel)
    one = teacher.first_rows(width)
    return one._replace(hidden=hidden, weight=one.weight.to(hidden.dtype))


def _blocks(rows: int, size: int) -> list[slice]:
    """Return slices of `size` rows that cover all rows: at least one, empty if there is no row."""
    return [slice(first, min(first + size, rows)) for first in range(0, max(rows, 1), size)]


@dataclass(frozen=True)
class HeadCall:
    """The settings and the teachers of one call."""

    objective: KDObjective
    shard: VocabShard
    tp_group: dist.ProcessGroup | None
    blocks: list[slice]
    loss_rows: Tensor | None
    student: HeadInput
    teachers: list[HeadInput]  # hidden states of the whole sequence, or of the loss rows (`is_compact`)
    shares: Sequence[float]
    with_gradient: bool
    loss_gradient: Tensor | None
    logits_dtype: torch.dtype

    def rows(self, block: slice) -> Tensor | slice:
        """Return the rows of a block, as an index of the sequence."""
        return block if self.loss_rows is None else self.loss_rows[block]

    def student_head(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> HeadInput:
        """Return the student's head of these tensors, in the dtype of the hidden states."""
        return self.student._replace(hidden=hidden, weight=weight.to(hidden.dtype), bias=bias)

    def data(
        self, student: HeadInput, labels: Tensor, mask: Tensor, block: slice
    ) -> tuple[LossRows, Tensor | None]:
        """Return a block with both models' logits, and the tanh of the student's if they are capped."""
        rows = self.rows(block)
        logits, tanh = softcap_and_tanh(student.product(rows, self.logits_dtype), student.logits_cap)
        return LossRows(logits, self.teacher_logits(block), labels[rows], mask[rows]), tanh

    def teacher_logits(self, block: slice) -> Tensor | None:
        """Return the logits [n, w] of the teacher, or of several as one; None without a teacher."""
        width = self.student.weight.shape[0]
        rows = self.rows(block)
        logits = (
            one.logits(block if one.is_compact else rows, self.logits_dtype, width) for one in self.teachers
        )
        if len(self.teachers) < 2:
            return next(logits, None)
        return mixture_logits(
            logits, self.shares, self.objective.temperature, self.shard.shared, self.tp_group
        )

    def product_gradient(
        self, data: LossRows, tanh: Tensor | None, merged: MergedStatistics, weight: Tensor
    ) -> Tensor:
        """Return the gradient [n, w] by hidden @ weight.T + bias, in the dtype of the hidden states.

        `weight` [n] is the derivative of the final scalar by each row's loss. The gradient of the logits is
        written over them if they have that dtype.
        """
        student, dtype = data.student, self.student.hidden.dtype
        result = student if student.dtype == dtype else torch.empty_like(student, dtype=dtype)
        write_gradient = passes_for(student, self.objective).write_gradient
        write_gradient(result, data, weight, merged, self.shard, self.objective)
        result = through_softcap(result, tanh)
        return result if self.student.scale == 1.0 else result.mul_(self.student.scale)


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
    """([t, h_s], [w, h_s], [w] | None, [t], [t], HeadCall) -> (loss, rest of `KDOutput`)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        loss_mask: Tensor,
        call: HeadCall,
    ) -> tuple[Tensor, dict[str, Tensor | None]]:
        gradients, student = None, call.student_head(hidden, weight, bias)
        if call.with_gradient:
            gradients = HeadGradients(
                hidden,
                weight,
                call.loss_rows is not None,
                call.loss_gradient is not None,
                operand=student.weight,
                bias=bias,
            )
        loss: Any = 0.0
        sums: dict[str, Any] = {}
        for block in call.blocks:
            rows = call.rows(block)
            data, tanh = call.data(student, labels, loss_mask, block)
            merged = row_losses(data, call.shard, call.objective, call.tp_group)
            block_loss, block_sums = weighted_sums(merged, data.mask, call.objective)
            loss = loss + block_loss
            sums = {name: None if v is None else v + sums.get(name, 0) for name, v in block_sums.items()}
            if gradients is not None:
                row_weight = data.mask if call.loss_gradient is None else data.mask * call.loss_gradient
                gradient = call.product_gradient(data, tanh, merged, row_weight)
                gradients.add(rows, hidden[rows], gradient)
                del gradient
            del data, tanh  # before the next block's logits are made
        ctx.gradients, ctx.loss_gradient = gradients, call.loss_gradient
        return loss, sums

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, loss_gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "gradients were made in forward, for one backward"
        return *gradients.finish(loss_gradient, ctx.loss_gradient), None, None, None
