"""Parts of a layer that are mkd's own: RMSNorm, a norm behind a block, a scale, and the gated MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.autograd import Function

Kernel = Callable[..., Tensor]


class RMSNorm(nn.Module):
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension, statistics in fp32.

    Source: Zhang and Sennrich 2019. With `layernorm_zero_centered_gamma` the factor is `1 + weight`, applied
    in fp32 before rounding, as Gemma does. It is the norm of local layers: unlike Megatron's torch wrapper it
    allows sequence parallelism. Then each tensor-parallel rank sees its share of the tokens. The weight is
    marked so that Megatron sums its gradient over the tensor-parallel group (all-reduce SUM after backward).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float):
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        start = 0.0 if self.is_zero_centered else 1.0
        self.weight = nn.Parameter(
            torch.full((hidden_size,), start, dtype=config.params_dtype, device=device)
        )
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:  # [..., hidden_size] -> same shape and dtype
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        if self.is_zero_centered:
            return (x32 * scale * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * (x32 * scale).to(x.dtype)


class PostNorm:
    """Mixin in front of a row-parallel linear layer without bias, which normalises the layer's output.

    It comes before the residual addition, and applies to the sum over the tensor-parallel group. With
    sequence parallelism the layer returns this rank's share of the tokens; the norm marks its weight
    accordingly.
    """

    norm_class: type

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options):
        super().__init__(input_size, output_size, config=config, **options)
        self.post_layernorm = self.norm_class(
            config=config, hidden_size=output_size, eps=config.layernorm_epsilon
        )

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the normalised product [t(/tp), 1, h], and None.

        The None is the bias, which Megatron would add later.
        """
        output, bias = super().forward(x)
        assert bias is None, "a bias would have to be added before the norm"
        return self.post_layernorm(output), None


@cache
def with_post_norm(linear: type, norm: type) -> type:
    """Return a subclass of the row-parallel layer `linear` that ends with `norm`.

    `linear` may be Megatron's or Transformer Engine's.
    """
    return type(f"{linear.__name__}WithNorm", (PostNorm, linear), {"norm_class": norm})


class ScaledLayer(TransformerLayer):
    """A layer whose output is multiplied by a stored number, which is not trained."""

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any):
        super().__init__(config, *args, **options)
        one = torch.ones(1, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.register_buffer("output_scale", one)

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Return (hidden state [t(/tp), 1, h], Megatron's `context`)."""
        hidden, context = super().forward(*args, **options)
        return hidden * self.output_scale, context


class ReplicatedLinear(nn.Module):
    """A matrix that every tensor-parallel rank holds whole, applied to the tokens of this rank.

    With sequence parallelism each rank sees its share of the tokens, so the weight is marked: Megatron sums
    its gradient over the tensor-parallel group (all-reduce SUM after backward).
    """

    def __init__(self, input_size: int, output_size: int, config: TransformerConfig):
        super().__init__()
        device = torch.cuda.current_device()
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype, device=device)
        self.weight = nn.Parameter(weight)
        config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:  # [..., input_size] -> [..., output_size]
        return F.linear(x, self.weight)


class GatedMLP(MLP):
    """Megatron's MLP with Transformer Engine's kernel for the gate.

    It lacks what mkd's models never have: scales of tokens, gates of other forms. Megatron's own gate is
    compiled by torch, and a call of compiled code costs some 0.15 ms of CPU time. Small models wait for that.
    """

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
