"""The gated MLP with Transformer Engine's kernel for the gate.

Megatron's own gate is compiled by torch, and a call of compiled code costs some 0.15 ms of CPU time. Small
models wait for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from torch import Tensor
from torch.autograd import Function

Kernel = Callable[..., Tensor]


class GatedMLP(MLP):
    """Megatron's MLP without what mkd's models never have: scales of tokens, gates of other forms."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        groups: ProcessGroupCollection | None = None,
        **unused: object,  # what some versions of Megatron's layer pass to modules that are not its own
    ):
        tp_group = None if groups is None else groups.tp
        super().__init__(config, submodules, ffn_hidden_size=config.ffn_hidden_size, tp_group=tp_group)

    def forward(self, hidden_states: Tensor, **unused: object) -> tuple[Tensor, Tensor | None]:
        """Return the output [t(/tp), 1, h] for hidden states of that shape, and a bias still to be added.

        `unused` is what Megatron's layer passes for mixtures of experts.
        """
        gate_up, bias = self.linear_fc1(hidden_states)
        gate_up = gate_up if bias is None else gate_up + bias
        return self.linear_fc2(_Gate.apply(gate_up, *_kernels(self.config.activation_func)))


def _kernels(activation: Callable[[Tensor], Tensor]) -> tuple[Kernel, Kernel]:
    """Return Transformer Engine's kernels of the gate: forward and backward."""
    import transformer_engine_torch as kernels

    if activation is F.gelu:  # the tanh form, as in Megatron's fused gate
        return kernels.geglu, kernels.dgeglu
    assert activation is F.silu, activation
    return kernels.swiglu, kernels.dswiglu


class _Gate(Function):
    """[t, 1, 2f] -> [t, 1, f]: the activation of the first half of the channels, times the second half."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, kernel: Kernel, backward_kernel: Kernel) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.kernel = backward_kernel
        return kernel(gate_up, None)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (gate_up,) = ctx.saved_tensors
        return ctx.kernel(gradient.contiguous(), gate_up, None), None, None
