"""The experts of one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from torch import Tensor, nn

from mkd.models.moe.clamped_gate import ClampedGate, add_biases


class LocalExperts(SequentialMLP):
    """One MLP after another, without Transformer Engine."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        mark_as_experts(self.parameters())


class GroupedExperts(TEGroupedMLP):
    """All experts in two grouped products of Transformer Engine."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        mark_as_experts(self.parameters())

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
        if not self.config.add_bias_linear:
            return super().forward(rows, counts, weights)
        limit, offset = self.config.activation_func_clamp_value, self.config.glu_linear_offset
        splits = counts.tolist()
        gate_up, _ = self.linear_fc1(rows, splits)
        output, biases = self.linear_fc2(ClampedGate.apply(gate_up, weights[:, None], limit, offset), splits)
        return add_biases(output, biases, counts, weights), None


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
