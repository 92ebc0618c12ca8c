"""The computation of a mixer between its projections, in torch; `fused_recurrence.py` has kernels.

While a student samples, operations that remember the tokens of earlier rows take their place: see
`kinds/sampled/sampler/recurrent_state.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mkd.models.mixers.convolution import causal_convolution
from mkd.models.mixers.pack_rows import PackRows
from mkd.models.mixers.scan import gated_delta_rule

NORM_EPSILON = 1e-6  # added to the squared length of queries and keys


class PackedRecurrence:
    """Operations on the rows of a whole pack, whose documents begin with nothing before them.

    The recurrence and the statistics are in fp32, as in transformers.
    """

    def convolve(self, x: Tensor, filters: Tensor, bias: Tensor | None, rows: PackRows) -> Tensor:
        """Return SiLU of the convolution [t, c] of `x` [t, c] with `filters` [c, k], and of `bias` [c].

        See `causal_convolution`.
        """
        mixed = causal_convolution(x, filters, rows.positions)
        return F.silu(mixed if bias is None else mixed + bias)

    def delta_rule(
        self,
        q: Tensor,  # [t, key heads, dk], of any length
        k: Tensor,  # [t, key heads, dk], of any length
        v: Tensor,  # [t, heads, dv]; heads are a multiple of key heads
        g: Tensor,  # [t, heads] fp32, log of the decay, at most 0
        beta: Tensor,  # [t, heads] fp32
        rows: PackRows,
    ) -> Tensor:
        """Return the outputs [t, heads, dv] of the gated delta rule, with the dtype of `v`."""
        return gated_delta_rule(*recurrence_inputs(q, k, v), g, beta, rows.documents)[0].to(v.dtype)

    def delta_rule_with_states(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        rows: PackRows,
        spans: Sequence[tuple[int, int]],  # first token of each document, and the one behind its last
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs, and the states behind the documents, [spans, heads, dk, dv] fp32."""
        ends = [end - 1 for _, end in spans]
        inputs = recurrence_inputs(q, k, v)
        outputs, states = gated_delta_rule(*inputs, g, beta, rows.documents, ends)
        return outputs.to(v.dtype), states

    def decayed_sum(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, rows: PackRows) -> Tensor:
        """Return the outputs [t, heads, dv] of `gated_delta_rule` without corrections."""
        return gated_delta_rule(q, k, v, g, None, rows.documents)[0]

    def gated_norm(
        self,
        x: Tensor,  # [t, heads, dv]
        gate: Tensor,  # [t, heads, dv]
        weight: Tensor,  # [dv]
        epsilon: float,
    ) -> Tensor:
        """Return RMSNorm of every head times SiLU of the gate, [t, heads, dv]."""
        x32 = wide(x)
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + epsilon)
        return ((weight * (x32 * scale).to(x.dtype)) * F.silu(wide(gate))).to(x.dtype)


def recurrence_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of every value head, [t, heads, d] fp32.

    Queries and keys get the length 1. Queries are divided by the root of their size.
    """
    each = v.size(1) // k.size(1)
    q, k = (_unit(wide(x)).repeat_interleave(each, dim=1) for x in (q, k))
    return q * q.size(-1) ** -0.5, k, wide(v)


def wide(x: Tensor) -> Tensor:
    """Return `x` in fp32, or in fp64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _unit(x: Tensor) -> Tensor:
    """Return `x` with vectors of length 1 in the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)
