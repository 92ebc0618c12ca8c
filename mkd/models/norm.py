"""RMSNorm for the local layer spec. Unlike Megatron's torch wrapper it allows sequence parallelism."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension, statistics in fp32.

    Source: Zhang and Sennrich 2019. With `layernorm_zero_centered_gamma` the factor is `1 + weight`, applied
    in fp32 before rounding, as Gemma does. With sequence parallelism each tensor-parallel rank sees its share
    of the tokens. The weight is marked so that Megatron sums its gradient over the tensor-parallel group
    (all-reduce SUM after backward).
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
