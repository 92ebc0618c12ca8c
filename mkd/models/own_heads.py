"""Self-attention with heads of the layer's own, with values made of keys, and with normalised values."""

from __future__ import annotations

from copy import copy
from functools import cache
from typing import Any

import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn

from mkd.families.layer_shape import HeadsShape


class OwnHeadsAttention(SelfAttention):
    """Megatron's self-attention with other heads than the model's configuration says.

    Key/value heads are padded to a multiple of the tensor-parallel size, as everywhere.
    """

    def __init__(self, config: TransformerConfig, *args: Any, heads: HeadsShape, **options: Any):
        config, tensor = copy(config), config.tensor_model_parallel_size
        config.num_query_groups = -(-heads.num_query_groups // tensor) * tensor
        config.num_attention_heads = config.num_query_groups * heads.heads_per_group
        config.kv_channels = heads.head_dim
        super().__init__(config, *args, **options)


class SharedKeyAttention(SelfAttention):
    """Megatron's self-attention whose values are the keys before their norm and rotation.

    Its joint projection, a `without_values`, has the queries of a group, then the key.
    """

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *unused: object, **options: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, each [t, 1, heads or groups, d]."""
        projected, _ = self.linear_qkv(hidden_states)
        size, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        heads = self.num_attention_heads_per_partition
        projected = projected.unflatten(-1, (groups, -1, size))
        query, value = projected.split((heads // groups, 1), dim=-2)
        query, value = query.reshape(*query.shape[:2], heads, size), value.squeeze(-2)
        return self.q_layernorm(query), self.k_layernorm(value), value


class NormedValueAttention(SelfAttention):
    """Megatron's self-attention with an RMSNorm of every value head, which has no weight."""

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """Return Megatron's tensors with normalised values [t, 1, groups, d]."""
        query, key, value, *others = super().get_query_key_value_tensors(*args, **options)
        value = F.rms_norm(value, value.shape[-1:], eps=self.config.layernorm_epsilon)
        return (query, key, value, *others)


@cache
def without_values(linear: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of the column-parallel layer `linear` without the rows of values."""

    class WithoutValues(linear):
        def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any):
            output_size -= config.num_query_groups * config.kv_channels
            super().__init__(input_size, output_size, config=config, **options)

    return WithoutValues
