"""Multi-head latent attention (MLA) of packed documents, for DeepSeek-V3 and its relatives.

Source: DeepSeek-V2 (2024), section 2.1. Parameter names are those of Megatron's own module.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from mkd.families.layer_shape import LayerShape
from mkd.models.layer_parts import ReplicatedLinear
from mkd.models.packed import PackedDocuments


@dataclass(frozen=True)
class LatentAttentionParts:
    """The modules that latent attention is made of: Megatron's local ones or Transformer Engine's."""

    column_linear: type  # without a norm inside
    row_linear: type
    norm: type
    core_attention: type


class LatentAttention(MegatronModule):
    """Self-attention whose queries, and keys with values, are projected from narrow latents.

    The projections to the latents are replicated over the tensor-parallel group, those to the heads are cut
    by heads. Every head has the same rotated key channels. `layer` gives the sizes.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: LatentAttentionParts,
        layer_number: int,
        *,
        layer: LayerShape,
        attn_mask_type: AttnMaskType,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection,
        **unused: object,  # what newer versions of Megatron's layer hand over
    ) -> None:
        super().__init__(config=config)
        assert layer.mla is not None and layer.rope is not None, "the layer has no latent attention"
        self.mla, self.attention_factor = layer.mla, layer.rope.attention_factor
        self.attn_mask_type = attn_mask_type
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.heads = config.num_attention_heads // self.tp_group.size()
        self.is_recomputed = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )
        self.core_attention = submodules.core_attention(
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            cp_comm_type=cp_comm_type,
            softmax_scale=config.softmax_scale or self.mla.qk_head_dim**-0.5,
            k_channels=self.mla.qk_head_dim,
            v_channels=self.mla.v_head_dim,
            pg_collection=pg_collection,
        )
        self._build_projections(submodules)

    def _build_projections(self, parts: LatentAttentionParts) -> None:
        config, mla, heads = self.config, self.mla, self.config.num_attention_heads
        options = dict(config=config, bias=False, is_expert=False, tp_group=self.tp_group)
        to_heads = partial(
            parts.column_linear,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **options,
        )
        query_size = heads * mla.qk_head_dim
        if mla.q_lora_rank is None:
            self.linear_q_proj = to_heads(config.hidden_size, query_size, tp_comm_buffer_name="q_proj")
        else:
            self.linear_q_down_proj = ReplicatedLinear(config.hidden_size, mla.q_lora_rank, config)
            self.q_layernorm = parts.norm(config, mla.q_lora_rank, mla.norm_epsilon)
            self.linear_q_up_proj = to_heads(mla.q_lora_rank, query_size, tp_comm_buffer_name="q_up_proj")
        latent_size = mla.kv_lora_rank + mla.qk_rope_head_dim
        self.linear_kv_down_proj = ReplicatedLinear(config.hidden_size, latent_size, config)
        self.kv_layernorm = parts.norm(config, mla.kv_lora_rank, mla.norm_epsilon)
        key_value_size = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        self.linear_kv_up_proj = to_heads(mla.kv_lora_rank, key_value_size, tp_comm_buffer_name="kv_up_proj")
        self.linear_proj = parts.row_linear(
            heads * mla.v_head_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **options,
        )

    def forward(
        self,
        hidden_states: Tensor,  # [t(/tp), 1, h], after the layer's norm
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor,  # angles, [n, 1, 1, qk_rope_head_dim]
        packed_seq_params: PackedDocuments,
        **unused: object,  # what Megatron's layers hand to every attention
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [t(/tp), 1, h], and None in place of a bias."""
        rotate = partial(
            apply_rotary_pos_emb,
            freqs=rotary_pos_emb,
            config=self.config,
            cu_seqlens=packed_seq_params.cu_seqlens_q_padded,
            mscale=self.attention_factor,
            cp_group=self.cp_group,
        )
        query = self._query(hidden_states, rotate)
        key, value = self._key_and_value(hidden_states, rotate)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self.core_attention(
                query,
                key,
                value,
                attention_mask,
                attn_mask_type=self.attn_mask_type,
                packed_seq_params=packed_seq_params,
            )

        if self.is_recomputed and self.training:
            output = tensor_parallel.checkpoint(attend, False, query, key, value)
        else:
            output = attend(query, key, value)
        return self.linear_proj(output.reshape(output.size(0), 1, -1))

    def _query(self, hidden: Tensor, rotate: partial[Tensor]) -> Tensor:
        """Return the queries of this rank's heads: [t(/tp), 1, h] -> [t, heads, qk_head_dim]."""
        if self.mla.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))
        query = query.view(query.size(0), self.heads, self.mla.qk_head_dim)
        plain, rotated = query.split((self.mla.qk_nope_head_dim, self.mla.qk_rope_head_dim), dim=-1)
        return torch.cat((plain, rotate(self._as_halves(rotated))), dim=-1)

    def _key_and_value(self, hidden: Tensor, rotate: partial[Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys [t, heads, qk_head_dim] and values [t, heads, v_head_dim] of this rank's heads."""
        mla = self.mla
        latent, rotated = self.linear_kv_down_proj(hidden).split(
            (mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1
        )
        key_value, _ = self.linear_kv_up_proj(self.kv_layernorm(latent.contiguous()))
        key_value = key_value.view(key_value.size(0), self.heads, -1)
        plain, value = key_value.split((mla.qk_nope_head_dim, mla.v_head_dim), dim=-1)
        rotated = rotate(self._as_halves(self._for_all_heads(rotated)))
        key = torch.cat((plain, rotated.expand(-1, self.heads, -1)), dim=-1)
        return key, value.contiguous()

    def _for_all_heads(self, rotated: Tensor) -> Tensor:
        """Return the shared key channels of all tokens: [t(/tp), 1, r] -> [t, 1, r].

        With sequence parallelism an all-gather over TP; backward: reduce-scatter SUM. Otherwise the identity;
        backward: all-reduce SUM over TP, because each rank has the gradient of its heads.
        """
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(rotated, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(rotated, group=self.tp_group)

    def _as_halves(self, x: Tensor) -> Tensor:
        """Move neighbouring rotated channels half a head apart, as Megatron's rotation expects them.

        Queries and keys are permuted alike, so that their products stay.
        """
        if not self.mla.interleaved_rope:
            return x.contiguous()
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
