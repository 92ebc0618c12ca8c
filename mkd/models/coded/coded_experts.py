"""The experts of one process, whose matrices are codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import silu

from mkd.models.coded.coded_product import CodedStack, ExpertRows, coded_product, has_kernel
from mkd.models.moe.clamped_gate import add_biases
from mkd.models.moe.experts import gated


class CodedExperts(nn.Module):
    """Takes the place of `LocalExperts` or `GroupedExperts` in a frozen model."""

    def __init__(
        self,
        config: TransformerConfig,
        first: CodedStack,  # gates and up projections
        second: CodedStack,  # down projections
        first_biases: Sequence[nn.Parameter] = (),  # of each expert; (): none
        second_biases: Sequence[nn.Parameter] = (),
    ):
        super().__init__()
        self.config, self.first, self.second = config, first, second
        self.first_biases, self.second_biases = map(nn.ParameterList, (first_biases, second_biases))

    @property
    def is_one_product(self) -> bool:
        """True if every product of all experts is one kernel, so that the host need not know the counts."""
        return has_kernel(self.first) and has_kernel(self.second)

    def forward(
        self,
        rows: Tensor,  # [n, h], rows of the first expert first
        counts: Tensor,  # int64 [experts]
        weights: Tensor,  # [n], the rows' weights
    ) -> tuple[Tensor, None]:
        """Return the weighted outputs, [n, h], and None for a bias."""
        of_experts = ExpertRows.of(counts, rows.device)
        gate_up = coded_product(rows, of_experts, self.first)
        if len(self.first_biases):
            gate_up = add_biases(gate_up, list(self.first_biases), counts, torch.ones_like(weights))
        inner = self._gated(gate_up, weights)
        del gate_up  # before the second product, whose matrices may need its memory
        output = coded_product(inner, of_experts, self.second)
        if len(self.second_biases):
            output = add_biases(output, list(self.second_biases), counts, weights)
        return output, None

    def _gated(self, gate_up: Tensor, weights: Tensor) -> Tensor:
        if gate_up.is_cuda or self.config.activation_func is not silu:
            return gated(self.config, gate_up, weights)
        gate, up = gate_up.chunk(2, dim=-1)  # Megatron's fused gate would be compiled here
        return (silu(gate) * up * weights[:, None]).to(gate_up.dtype)
