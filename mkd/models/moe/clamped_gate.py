"""GPT-OSS's gate, and the biases of grouped experts, as few kernels that keep little for backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from mkd.families.layer_shape import QUICK_GELU_GAIN as GAIN


class ClampedGate(Function):
    """[n, 2f], weights fp32 [n, 1] -> [n, f]: weight * (up + offset) * gate * sigmoid(1.702 gate).

    Before that, gates are clamped to at most `limit`, up projections to [-limit, limit]. Computes in fp32 and
    keeps its inputs. Source: GPT-OSS model card (OpenAI 2025), section 2.3, and its published code.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor, limit: float, offset: float) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        ctx.constants = limit, offset
        return _function(_forward, gate_up.is_cuda)(gate_up, weights, limit, offset)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate_up, weights = ctx.saved_tensors
        backward = _function(_backward, gate_up.is_cuda)
        return *backward(gradient, gate_up, weights, *ctx.constants), None, None


@cache
def _function(function: Callable[..., Any], is_compiled: bool) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True) if is_compiled else function


def _forward(gate_up: Tensor, weights: Tensor, limit: float, offset: float) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + offset
    return (weights * up * gate * torch.sigmoid(GAIN * gate)).to(gate_up.dtype)


def _backward(
    gradient: Tensor, gate_up: Tensor, weights: Tensor, limit: float, offset: float
) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.float().chunk(2, dim=-1)
    free_gate, free_up = gate <= limit, up.abs() <= limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + offset
    sigmoid = torch.sigmoid(GAIN * gate)
    activated, slope = gate * sigmoid, sigmoid * (1 + GAIN * gate * (1 - sigmoid))
    of_weights = (gradient.float() * up * activated).sum(-1, keepdim=True)
    scaled = gradient.float() * weights
    of_gate_up = torch.cat((scaled * up * slope * free_gate, scaled * activated * free_up), dim=-1)
    return of_gate_up.to(gate_up.dtype), of_weights.to(weights.dtype)


def add_biases(
    output: Tensor,  # [n, h], rows of the first expert first
    biases: Sequence[Tensor],  # [h] of each expert
    counts: Tensor,  # int64 [experts], rows of each expert
    weights: Tensor,  # [n]
) -> Tensor:
    """Return the output plus, in each row, its weight times the bias of its expert, [n, h].

    One product with a matrix [n, experts] that holds each weight in its expert's column.
    """
    experts = torch.arange(len(biases), device=output.device)
    owner = experts.repeat_interleave(counts.to(output.device), output_size=output.size(0))
    of_experts = output.new_zeros(output.size(0), len(biases))
    of_experts = of_experts.scatter(1, owner[:, None], weights[:, None].to(output.dtype))
    return torch.addmm(output, of_experts, torch.stack(tuple(biases)))
