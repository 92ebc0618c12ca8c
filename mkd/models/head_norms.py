"""Norms of queries and keys that Megatron's self-attention does not have: over all heads, and turned ones."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup, all_reduce

from mkd.models.attention import LayerRopeAttention, sharded_by_heads


class _Normalised(Function):
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension, of which each rank of a group has a part.

    All-reduce SUM of a number per row over the group, in forward and in backward. Statistics are in fp32.
    Source: Zhang and Sennrich 2019.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [..., n]
        weight: Tensor,  # [n]
        count: int,  # channels of the whole row
        eps: float,
        group: ProcessGroup | None,  # None: this rank has the whole row
    ) -> Tensor:
        x32 = x.float()
        scale = torch.rsqrt(_over(group, x32.square().sum(-1, keepdim=True)) / count + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.count, ctx.group = count, group
        return weight * (x32 * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        unit = x.float() * scale
        by_unit = gradient.float() * weight.float()
        along = _over(ctx.group, (by_unit * unit).sum(-1, keepdim=True)) / ctx.count
        of_weight = (gradient.float() * unit).flatten(0, -2).sum(0)
        of_x = scale * (by_unit - unit * along)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None, None, None


def _over(group: ProcessGroup | None, sums: Tensor) -> Tensor:
    if group is not None and group.size() > 1:
        all_reduce(sums, group=group)
    return sums


class JointNorm(nn.Module):
    """RMSNorm of a token's heads together: [t, 1, heads, d] -> the same.

    Tensor parallelism cuts heads and weight alike. `count` are the real channels of all ranks; heads of
    padding are zero.
    """

    def __init__(self, config: TransformerConfig, channels: int, count: int, group: ProcessGroup):
        super().__init__()
        self.count, self.eps, self.group = count, config.layernorm_epsilon, group
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(channels, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, heads: Tensor) -> Tensor:
        rows = heads.flatten(-2)
        return _Normalised.apply(rows, self.weight, self.count, self.eps, self.group).view_as(heads)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return Megatron's sharded state: the weight is cut over tensor parallel by heads."""
        return sharded_by_heads(self, "weight", self.group, prefix, sharded_offsets, metadata)


class JointNormAttention(SelfAttention):
    """Megatron's self-attention with an RMSNorm of all query heads together, and one of all key heads."""

    def __init__(self, config: TransformerConfig, *args: Any, norm_channels: tuple[int, int], **options: Any):
        super().__init__(config, *args, **options)
        d, group = self.hidden_size_per_attention_head, self.pg_collection.tp
        own = self.num_attention_heads_per_partition * d, self.num_query_groups_per_partition * d
        self.joint_query_norm = JointNorm(config, own[0], norm_channels[0], group)
        self.joint_key_norm = JointNorm(config, own[1], norm_channels[1], group)

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """Return Megatron's tensors with normalised queries and keys [t, 1, heads, d]."""
        query, key, *others = super().get_query_key_value_tensors(*args, **options)
        return (self.joint_query_norm(query), self.joint_key_norm(key), *others)


class TurnedNorm(nn.Module):
    """RMSNorm of every head of this rank, [t, 1, heads, d].

    Every tensor-parallel rank has the weight [d]; the gradients of their heads are added (all-reduce SUM in
    backward).
    """

    def __init__(self, config: TransformerConfig, channels: int, group: ProcessGroup):
        super().__init__()
        self.eps, self.group = config.layernorm_epsilon, group
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(channels, dtype=config.params_dtype, device=device))

    def forward(self, heads: Tensor) -> Tensor:
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self.group)
        return _Normalised.apply(heads, weight, heads.size(-1), self.eps, None)


class TurnedNormAttention(LayerRopeAttention):
    """Self-attention that turns queries and keys first, and normalises every head afterwards."""

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any):
        super().__init__(config, *args, **options)
        d, group = self.hidden_size_per_attention_head, self.pg_collection.tp
        self.turned_query_norm = TurnedNorm(config, d, group)
        self.turned_key_norm = TurnedNorm(config, d, group)

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """Return Megatron's tensors with queries and keys [t, 1, heads, d] turned, then normalised."""
        query, key, *others = super().get_query_key_value_tensors(*args, **options)
        return (self.turned_query_norm(query), self.turned_key_norm(key), *others)
