"""The experts of one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any

import torch
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from mkd.models.moe.clamped_gate import ClampedGate, add_biases
from mkd.models.moe.grouped_product import can_group, grouped_product, place_side_by_side
from mkd.models.moe.squared_relu import WeightedSquaredReLU
from mkd.models.transformer_config import gelu_tanh


class LocalExperts(SequentialMLP):
    """One MLP after another, without Transformer Engine."""

    is_one_product = False

    def __init__(self, num_local_experts: int, config: TransformerConfig, *args: Any, **options: Any):
        super().__init__(num_local_experts, _with_gate(config), *args, **options)
        mark_as_experts(self.parameters())


class GroupedExperts(TEGroupedMLP):
    """All experts in two grouped products: in bf16 of torch, else of Transformer Engine.

    Transformer Engine launches a kernel for each expert, and waits for the counts on the host.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, *args: Any, **options: Any):
        super().__init__(num_local_experts, _with_gate(config), *args, **options)
        mark_as_experts(self.parameters())
        for linear in (self.linear_fc1, self.linear_fc2):
            place_side_by_side(linear, [f"weight{expert}" for expert in range(self.num_local_experts)])

    @property
    def is_one_product(self) -> bool:
        """True if every product of all experts is one kernel, so that the host need not know the counts."""
        weights = [self._of(linear, "weight") for linear in (self.linear_fc1, self.linear_fc2)]
        return all(can_group(of_linear[0][:1], of_linear) for of_linear in weights)

    def forward(
        self,
        permuted_local_hidden_states: Tensor,  # [n, h], rows of the first expert first
        tokens_per_expert: Tensor,  # int64 [local experts]
        permuted_probs: Tensor,  # [n], the rows' weights
    ) -> tuple[Tensor, None]:
        """Return the weighted outputs, [n, h], and None for a bias.

        Experts with biases have GPT-OSS's gate. Megatron would clamp into copies, which backward keeps, and
        add biases expert by expert.
        """
        rows, counts, weights = permuted_local_hidden_states, tokens_per_expert, permuted_probs
        first, second = (self._of(linear, "weight") for linear in (self.linear_fc1, self.linear_fc2))
        if can_group(rows, first) and can_group(rows, second):
            return self._in_one_kernel(rows, counts, weights, first, second), None
        if not self.config.add_bias_linear:
            return super().forward(rows, counts, weights)
        splits = counts.tolist()
        gate_up, _ = self.linear_fc1(rows, splits)
        output, biases = self.linear_fc2(gated(self.config, gate_up, weights), splits)
        return add_biases(output, biases, counts, weights), None

    def _in_one_kernel(
        self, rows: Tensor, counts: Tensor, weights: Tensor, first: Sequence[Tensor], second: Sequence[Tensor]
    ) -> Tensor:
        gate_up = grouped_product(rows, counts, first)
        if not self.config.add_bias_linear:
            return grouped_product(gated(self.config, gate_up, weights), counts, second)
        gate_up = add_biases(gate_up, self._of(self.linear_fc1, "bias"), counts, torch.ones_like(weights))
        output = grouped_product(gated(self.config, gate_up, weights), counts, second)
        return add_biases(output, self._of(self.linear_fc2, "bias"), counts, weights)

    def _of(self, linear: nn.Module, kind: str) -> list[nn.Parameter]:
        return numbered(linear, kind, self.num_local_experts)


def numbered(linear: nn.Module, kind: str, size: int) -> list[nn.Parameter]:
    """Return a grouped layer's parameters KIND0, KIND1, ..., one for each expert."""
    return [getattr(linear, f"{kind}{expert}") for expert in range(size)]


def gated(
    config: TransformerConfig,
    gate_up: Tensor,  # [n, i] or, with gates, [n, 2 i]
    weights: Tensor,  # [n]
) -> Tensor:
    """Return what the second product of experts multiplies, [n, i], times the rows' weights."""
    if config.add_bias_linear:
        limit, offset = config.activation_func_clamp_value, config.glu_linear_offset
        return ClampedGate.apply(gate_up, weights[:, None], limit, offset)
    if not config.gated_linear_unit:
        return WeightedSquaredReLU.apply(gate_up, weights[:, None])
    if config.activation_func is gelu_tanh:
        gate, up = gate_up.chunk(2, dim=-1)
        return (gelu_tanh(gate) * up * weights[:, None]).to(gate_up.dtype)
    assert config.activation_func is silu, "all other experts without biases have SwiGLU"
    return weighted_bias_swiglu_impl(gate_up, None, weights[:, None])


def _with_gate(config: TransformerConfig) -> TransformerConfig:
    """Return the configuration of experts: for them Megatron has no fused gate of GELU."""
    if config.activation_func not in (gelu, gelu_tanh):
        return config
    config = copy(config)
    config.activation_func, config.bias_activation_fusion = gelu_tanh, False
    return config


class ExpertRowLinear(RowParallelLinear):
    """The second product of a local expert.

    Megatron adds the bias to the output in place, which autograd refuses for the view that its layer returns.
    """

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        return (output if bias is None else output.clone()), bias


def mark_as_experts(parameters: Iterable[nn.Parameter]) -> None:
    """Mark weights that belong to one expert.

    Their gradients are reduced over the copies of the expert, at expert-parallel size 1 too, so that
    checkpoints of all sizes have the same form. Each counts in the gradient norm. None is summed over the
    tensor-parallel group, whose processes hold different experts.
    """
    for parameter in parameters:
        parameter.allreduce = False
        parameter.tensor_model_parallel = True
        parameter.sequence_parallel = False
