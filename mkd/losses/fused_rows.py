"""LM heads and loss in one, a value for each row, so that the caller may weight rows as it likes.

The gradient of a row's value is known only in backward. So forward stops after the row statistics, and
backward makes both models' logits again, block by block. That costs 1.6 times the operations of
`fused_linear.py`, and as little memory: no [t, v] tensor ever exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mkd.losses.differentiable_once import differentiable_once
from mkd.losses.fused_linear import HeadCall, head_call
from mkd.losses.kd_objective import KDObjective
from mkd.losses.lm_head import HeadGradients, HeadInput, whole_sequence
from mkd.losses.softmax import compute_dtype
from mkd.losses.statistics import VALUE_NAMES, RowValues, row_values
from mkd.losses.vocab_parallel import row_losses


def fused_linear_rows(
    student: HeadInput,
    teachers: Sequence[HeadInput],  # frozen
    labels: Tensor,  # [t] int64, as in `fused_linear_kd`
    loss_mask: Tensor,  # [t]
    objective: KDObjective,
    *,
    loss_rows: Tensor | None,  # [n] int64, the rows to compute; None: all
    **settings: Any,  # tp_group, block_rows, fp32_logits, shard: as in `fused_linear_kd`
) -> RowValues:
    """Return the loss of each row, differentiable by the student's hidden states, head weight and bias.

    Communication over the tensor-parallel group: as `fused_linear_kd` in forward; in backward an all-reduce
    of the gradient of the hidden states.
    """
    rows = labels.shape[0] if loss_rows is None else loss_rows.shape[0]
    call = head_call(student, teachers, objective, rows=rows, loss_rows=loss_rows, **settings)
    hidden = whole_sequence(student.hidden, call.tp_group, False)
    tensors = hidden, student.weight, student.bias, labels, loss_mask.to(compute_dtype(hidden))
    loss, values = _FusedRows.apply(*tensors, call)
    return RowValues(loss=loss, **values)


class _FusedRows(torch.autograd.Function):
    """([t, h_s], [w, h_s], [w] | None, [t], [t], HeadCall) -> (loss [n], rest of `RowValues`)."""

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
        student, blocks = call.student_head(hidden, weight, bias), []
        ctx.call, ctx.merged = call, []
        for block in call.blocks:
            data, _ = call.data(student, labels, loss_mask, block)
            merged = row_losses(data, call.shard, call.objective, call.tp_group)
            ctx.merged.append(merged)
            block_loss, values = row_values(merged, data.mask, call.objective)
            blocks.append({"loss": block_loss} | values)
            del data  # before the next block's logits are made
        ctx.save_for_backward(hidden, weight, bias, labels, loss_mask)
        present = [name for name, value in blocks[0].items() if value is not None]
        values = {name: torch.cat([block[name] for block in blocks]) for name in present}
        return values.pop("loss"), dict.fromkeys(VALUE_NAMES) | values

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, loss_gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, loss_mask = ctx.saved_tensors
        call: HeadCall = ctx.call
        student = call.student_head(hidden, weight, bias)
        compacted = call.loss_rows is not None
        gradients = HeadGradients(hidden, weight, compacted, False, operand=student.weight, bias=bias)
        for block, merged in zip(call.blocks, ctx.merged, strict=True):
            rows = call.rows(block)
            data, tanh = call.data(student, labels, loss_mask, block)
            row_weight = data.mask * loss_gradient[block]
            gradient = call.product_gradient(data, tanh, merged, row_weight)
            gradients.add(rows, hidden[rows], gradient)
            del data, tanh, gradient
        return *gradients.whole(), None, None, None
