"""The computation of a mixer between its projections, as Triton kernels of flash-linear-attention (fla-core).

They divide each document into chunks of 64 tokens, and take the list of all chunks. It is made on the device
with a size that follows from the numbers of tokens and documents, so that the host never waits.

Source: https://github.com/fla-org/flash-linear-attention
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mkd.errors import UsageError, first_line
from mkd.models.mixers.pack_rows import PackRows, Segments
from mkd.models.mixers.recurrence import PackedRecurrence
from mkd.plan.models.mixer_kernels import fla_version


class FusedRecurrence(PackedRecurrence):
    """The operations of `PackedRecurrence`: inputs and outputs in bf16, sums in fp32."""

    def convolve(self, x: Tensor, filters: Tensor, bias: Tensor | None, rows: PackRows) -> Tensor:
        where = rows.segments
        convolution = kernels()["convolution"]
        output, _ = convolution(
            x=x[None],
            weight=filters,
            bias=bias,
            activation="silu",
            cu_seqlens=where.borders,
            chunk_indices=where.chunks,
        )
        return output[0]

    def delta_rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: PackRows) -> Tensor:
        return _delta_rule(q, k, v, g, beta, rows.segments, has_states=False)[0]

    def delta_rule_with_states(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        rows: PackRows,
        spans: Sequence[tuple[int, int]],
    ) -> tuple[Tensor, Tensor]:
        """See `PackedRecurrence`. The padding behind a document is a document of its own."""
        borders = [border for span in spans for border in span] + [q.size(0)]
        assert borders[0] == 0, "the first document begins the row"
        where = Segments.of(torch.tensor(borders).to(q.device, non_blocking=True), q.size(0))
        outputs, states = _delta_rule(q, k, v, g, beta, where, has_states=True)
        return outputs, states[::2]

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return kernels()["gated norm"](x, gate, weight, None, activation="swish", eps=epsilon)


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, where: Segments, has_states: bool
) -> tuple[Tensor, Tensor]:
    outputs, states = kernels()["delta rule"](
        *(x[None] for x in (q, k, v, g, beta)),
        use_qk_l2norm_in_kernel=True,
        output_final_state=has_states,
        cu_seqlens=where.borders,
        chunk_indices=where.chunks,
    )
    return outputs[0], states


@cache
def kernels() -> dict[str, Any]:
    """Import the kernels, which takes seconds, and register mkd's part of their backward."""
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    from mkd.models.mixers.chunk_gradients import register_where_triton_is_wrong

    register_where_triton_is_wrong()
    return {"convolution": causal_conv1d, "delta rule": chunk_gated_delta_rule, "gated norm": rms_norm_gated}


def require_kernels() -> None:
    """Raise UsageError if the kernels cannot be imported. A model with fused mixers calls it when built."""
    try:
        kernels()
    except Exception as error:  # the type depends on what is broken: fla-core, Triton or a library of theirs
        raise UsageError(
            f"the kernels of fla-core {fla_version()} cannot be imported: {first_line(error)}",
            "the package is installed, so mixers were planned as fused kernels",
            "pip install --force-reinstall 'megatron-kd[hybrid]', or pip uninstall fla-core: "
            "mixers then run in plain torch, more slowly",
            code="package-missing",
        ) from error
