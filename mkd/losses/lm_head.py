"""An LM head in a fused loss: logits of some rows, and gradients that are summed block by block.

Logits are softcap(scale * (hidden @ weight.T + bias)).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.losses.softcap import softcap
from mkd.losses.softmax import compute_dtype


class HeadInput(NamedTuple):
    """Final hidden states of one model and its LM head."""

    hidden: Tensor  # [t, h] final hidden states; [t/tp, h] with sequence_parallel
    weight: Tensor  # [w, h] this rank's rows of the padded LM head
    logits_cap: float | None = None  # see `softcap`
    bias: Tensor | None = None  # [w]
    scale: float = 1.0  # factor of the product, bias included, before the cap
    is_compact: bool = False  # row i of `hidden`, [n, h] without sequence parallelism, is that of loss row i

    @property
    def is_bare(self) -> bool:
        """True if there is no bias and no scale."""
        return self.bias is None and self.scale == 1.0

    def first_rows(self, count: int) -> HeadInput:
        """Return the head of the first `count` ids; views."""
        if len(self.weight) <= count:
            return self
        bias = None if self.bias is None else self.bias[:count]
        return self._replace(weight=self.weight[:count], bias=bias)

    def product(self, rows: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """Return the logits [n, w] of some rows before the cap, in `dtype`."""
        result = head_product(self.hidden[rows], self.weight, dtype)
        if self.bias is not None:
            result.add_(self.bias)
        return result if self.scale == 1.0 else result.mul_(self.scale)

    def logits(self, rows: Tensor | slice, dtype: torch.dtype, width: int) -> Tensor:
        """Return the logits [n, width] of some rows in `dtype`; columns beyond the head's hold zeros."""
        result = softcap(self.product(rows, dtype), self.logits_cap)
        missing = width - result.shape[1]
        return torch.nn.functional.pad(result, (0, missing)) if missing > 0 else result


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


def whole_sequence(hidden: Tensor, tp_group: dist.ProcessGroup | None, sequence_parallel: bool) -> Tensor:
    """Return [t, h] on every rank; backward: reduce-scatter, or all-reduce SUM if nothing was split.

    Megatron is imported only if there is a group: it has these primitives.
    """
    if tp_group is None or dist.get_world_size(tp_group) == 1:
        return hidden
    from megatron.core import tensor_parallel

    if sequence_parallel:
        gather = tensor_parallel.gather_from_sequence_parallel_region
        return gather(hidden, tensor_parallel_output_grad=True, group=tp_group)
    return tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=tp_group)


class HeadGradients:
    """Gradients of hidden states, head weight and bias, summed block by block, returned in backward."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,  # gradients have its dtype
        compacted: bool,  # rows of `hidden` that no block has get zeros
        into_main_grad: bool,
        *,
        operand: Tensor | None = None,  # `weight` in the dtype of the hidden states; None: it has that dtype
        bias: Tensor | None = None,
    ):
        self.weight, self.operand = weight, weight if operand is None else operand
        has_main_grad = getattr(weight, "main_grad", None) is not None
        self.in_main_grad = into_main_grad and weight.requires_grad and has_main_grad
        self.hidden = (torch.zeros_like if compacted else torch.empty_like)(hidden)
        self.of_weight = self.of_bias = None
        if self.in_main_grad:
            self.of_weight = weight.main_grad
        elif weight.requires_grad:
            self.of_weight = torch.zeros_like(weight, dtype=compute_dtype(weight))
        self.bias_dtype = weight.dtype if bias is None else bias.dtype
        if bias is not None and bias.requires_grad:
            self.of_bias = torch.zeros_like(bias, dtype=compute_dtype(bias))

    def add(self, rows: Tensor | slice, hidden: Tensor, gradient: Tensor) -> None:
        """Add a block: `rows` of the sequence, their hidden states [n, h], the product's gradient [n, w]."""
        self.hidden[rows] = torch.mm(gradient, self.operand)
        if self.of_weight is not None:
            add_product(self.of_weight, gradient.t(), hidden)
        if self.of_bias is not None:
            self.of_bias += gradient.sum(dim=0, dtype=self.of_bias.dtype)

    def finish(
        self, loss_gradient: Tensor, announced: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients (of hidden states, of the weight, of the bias), times `loss_gradient`.

        They contain it already if it was `announced`.
        """
        if announced is not None:
            torch._assert_async(loss_gradient == announced)
        return self.whole(loss_gradient if announced is None else None)

    def whole(self, factor: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients without a check, times `factor` if it is given."""
        hidden = _scaled(self.hidden, self.hidden.dtype, factor)
        bias = None if self.of_bias is None else _scaled(self.of_bias, self.bias_dtype, factor)
        if self.in_main_grad:
            return hidden, self._placeholder(), bias
        weight = None if self.of_weight is None else _scaled(self.of_weight, self.weight.dtype, factor)
        return hidden, weight, bias

    def _placeholder(self) -> Tensor:
        """Return what autograd gets for a weight whose gradient is in `main_grad`: DDP wants a tensor."""
        if getattr(self.weight, "zero_out_wgrad", False):
            # tied: autograd adds the embedding's gradient, and DDP adds the sum to `main_grad`
            return torch.zeros_like(self.weight)
        self.weight.grad_added_to_main_grad = True  # DDP then ignores the values
        return torch.empty_like(self.weight)


def _scaled(gradient: Tensor, dtype: torch.dtype, factor: Tensor | None) -> Tensor:
    """Return the gradient times `factor` in `dtype`, in one pass and in place if it has the dtype."""
    if factor is None:
        return gradient.to(dtype)
    if gradient.dtype == dtype:
        return gradient.mul_(factor)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, accumulated in the dtype of `total` (fp32 for bf16 factors)."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
