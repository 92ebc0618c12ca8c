"""xIELU, an activation with two learned numbers, and the MLP without gates that has one.

Source: Huang and Schlag 2024, Deriving activation functions using integration (arXiv 2411.13010).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup

BLOCK_ROWS = 1024  # tokens


class XIELU(MegatronModule):
    """p x^2 + beta x above 0, n (e^min(x, eps) - 1 - x) + beta x below; p, n = softplus of the parameters.

    n has beta added. Every tensor-parallel rank has both parameters, [1], and applies them to its channels:
    their gradients are summed over the group (all-reduce SUM in backward). `beta` and `eps` are stored, and
    not trained.
    """

    def __init__(self, config: TransformerConfig, group: ProcessGroup | None):
        super().__init__(config)
        self.tp_group = group
        like = dict(dtype=config.params_dtype, device=torch.cuda.current_device())
        self.alpha_p = nn.Parameter(torch.full((1,), 0.8, **like).expm1().log())
        self.alpha_n = nn.Parameter(torch.full((1,), 0.3, **like).expm1().log())
        self.register_buffer("beta", torch.full((1,), 0.5, **like))
        self.register_buffer("eps", torch.full((1,), -1e-6, **like))

    def forward(self, x: Tensor) -> Tensor:  # [t, 1, f/tp] -> the same shape and dtype
        p, n = (
            copy_to_tensor_model_parallel_region(one, group=self.tp_group)
            for one in (self.alpha_p, self.alpha_n)
        )
        return _XIELU.apply(x, p, n, self.beta, self.eps)


class _XIELU(Function):
    """The formula and its gradients, in fp32 at least, block by block: temporaries stay small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
        ctx.save_for_backward(x, alpha_p, alpha_n, beta, eps)
        p, n, beta, eps = _widened(alpha_p, alpha_n, beta, eps)
        p, n, output = F.softplus(p), beta + F.softplus(n), torch.empty_like(x)
        for rows, result in zip(x.split(BLOCK_ROWS), output.split(BLOCK_ROWS), strict=True):
            (wide,) = _widened(rows)
            values = torch.where(wide > 0, p * wide.square(), n * _negative(wide, eps))
            result.copy_(values.add_(beta * wide))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *numbers = ctx.saved_tensors
        alpha_p, alpha_n, beta, eps = _widened(*numbers)
        p, n, of_x = F.softplus(alpha_p), beta + F.softplus(alpha_n), torch.empty_like(x)
        of_p, of_n = torch.zeros_like(p), torch.zeros_like(n)
        blocks = (one.split(BLOCK_ROWS) for one in (x, gradient, of_x))
        for rows, of_output, result in zip(*blocks, strict=True):
            wide, of_output = _widened(rows, of_output)
            is_positive = wide > 0
            of_p += torch.where(is_positive, of_output * wide.square(), 0.0).sum()
            of_n += torch.where(is_positive, 0.0, of_output * _negative(wide, eps)).sum()
            negative = torch.where(wide < eps, wide.exp(), 0.0).sub_(1.0).mul_(n)
            slope = torch.where(is_positive, 2.0 * p * wide, negative).add_(beta)
            result.copy_(slope.mul_(of_output))
        of_p, of_n = of_p * torch.sigmoid(alpha_p), of_n * torch.sigmoid(alpha_n)
        return of_x, of_p.to(numbers[0].dtype), of_n.to(numbers[1].dtype), None, None


def _negative(x: Tensor, eps: Tensor) -> Tensor:
    return torch.expm1(torch.minimum(x, eps)).sub_(x)


def _widened(*tensors: Tensor) -> list[Tensor]:
    return [one.to(torch.promote_types(one.dtype, torch.float32)) for one in tensors]


class XIELUMLP(MLP):
    """Megatron's MLP without gates, with an xIELU of its own."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        groups: ProcessGroupCollection | None = None,
        **unused: object,  # what some versions of Megatron's layer pass to modules that are not its own
    ):
        tp_group = None if groups is None else groups.tp
        super().__init__(config, submodules, ffn_hidden_size=config.ffn_hidden_size, tp_group=tp_group)
        self.activation_func = XIELU(config, tp_group)
