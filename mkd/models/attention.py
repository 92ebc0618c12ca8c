"""Megatron's self-attention with positions of other kinds, and packed (THD) causal attention by SDPA.

The latter is used on machines without Transformer Engine, or without its kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.attention import SDPBackend, sdpa_kernel

from mkd.families.layer_shape import WIDEST_HEAD
from mkd.models.packed import PackedDocuments
from mkd.parallel.zigzag import RowShard

# Not those of cuDNN, which may have wrong gradients: see attention_check.py.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class UnrotatedAttention(SelfAttention):
    """Megatron's self-attention whose queries and keys are not turned.

    The angles are those of other layers of the model.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=None, **options)


class LayerRopeAttention(SelfAttention):
    """Megatron's self-attention that turns queries and keys by the rotary embedding of its layer.

    For models whose layers differ in their embeddings: `rotary_pos_emb` then holds all of them, [embeddings,
    n, 1, 1, d], because Megatron hands one tensor, and one attention factor, to all layers. Each layer reads
    the first `rotary_dim` of the d channels. `rope_index` is None if the model has one embedding.
    """

    def __init__(
        self, *args: Any, rope_index: int | None, rotary_dim: int, attention_factor: float, **options: Any
    ):
        super().__init__(*args, **options)
        self.rope_index, self.rotary_dim = rope_index, rotary_dim
        self.attention_factor = attention_factor
        self._place: tuple[Tensor, Tensor] | None = None  # angles and borders of documents during `forward`

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedDocuments,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        angles = rotary_pos_emb if self.rope_index is None else rotary_pos_emb[self.rope_index]
        angles = angles[..., : self.rotary_dim].contiguous()  # Transformer Engine's kernel ignores strides
        self._place = angles, packed_seq_params.cu_seqlens_q_padded
        options |= dict(rotary_pos_emb=None, packed_seq_params=packed_seq_params)
        try:
            return super().forward(hidden_states, attention_mask, **options)
        finally:
            self._place = None

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """Return Megatron's tensors with queries and keys [t, 1, heads, d] turned."""
        query, key, *others = super().get_query_key_value_tensors(*args, **options)
        assert self._place is not None, "attention calls this in its forward"
        angles, borders = self._place
        turned = (
            apply_rotary_pos_emb(
                one.squeeze(1),
                angles,
                self.config,
                cu_seqlens=borders,
                mscale=self.attention_factor,
                cp_group=self.pg_collection.cp,
            ).unsqueeze(1)
            for one in (query, key)
        )
        return (*turned, *others)


class RowRopeAttention(SelfAttention):
    """Megatron's self-attention in which every row of the rank has angles of its own.

    Megatron would look up the rows of each document, and ask the device for their numbers in every layer.
    `rotary_pos_emb` is [t, 1, 1, d] of the rank's rows.
    """

    def __init__(self, *args: Any, attention_factor: float, **options: Any):
        super().__init__(*args, **options)
        self.attention_factor = attention_factor
        self._angles: Tensor | None = None  # during `forward`

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, rotary_pos_emb: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        self._angles = rotary_pos_emb
        try:
            return super().forward(hidden_states, attention_mask, rotary_pos_emb=None, **options)
        finally:
            self._angles = None

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """Return Megatron's tensors with queries and keys [t, 1, heads, d] turned."""
        groups = self.pg_collection
        query, key, *others = super().get_query_key_value_tensors(*args, **options)
        turned = (
            apply_rotary_pos_emb(
                one, self._angles, self.config, mscale=self.attention_factor, cp_group=groups.cp
            )
            for one in (query, key)
        )
        return (*turned, *others)


class GrowingQueryAttention(SelfAttention):
    """Megatron's self-attention whose queries are longer far behind the start of a document.

    `query_factors` of the pack multiplies them, one number for every row of this rank. A turned query times a
    number is the query times the number, turned.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._factors: Tensor | None = None  # during `forward`

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedDocuments,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        self._factors = packed_seq_params.query_factors
        try:
            return super().forward(
                hidden_states, attention_mask, packed_seq_params=packed_seq_params, **options
            )
        finally:
            self._factors = None

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """Return Megatron's tensors with queries [t, 1, heads, d] times their factors."""
        query, *others = super().get_query_key_value_tensors(*args, **options)
        if self._factors is not None:
            query = query * self._factors.to(query.dtype)
        return (query, *others)


class GatedAttention(SelfAttention):
    """Megatron's self-attention whose output is multiplied by the sigmoid of a gate, channel by channel.

    The rows of the joint projection are in the order of Hugging Face models, group by group: the query and
    the gate of each head, then key and value. Megatron has all queries of a group before its gates.
    """

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *unused: object, **options: object
    ) -> tuple[Tensor, ...]:
        """Return query, key, value and gate, each [t, 1, heads or groups, d]."""
        projected, _ = self.linear_qkv(hidden_states)
        size, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        heads = self.num_attention_heads_per_partition
        projected = projected.unflatten(-1, (groups, -1, size))
        query_and_gate, key, value = projected.split((2 * heads // groups, 1, 1), dim=-2)
        query, gate = query_and_gate.unflatten(-2, (-1, 2)).unbind(-2)
        query, gate = (one.reshape(*one.shape[:2], heads, size) for one in (query, gate))
        key, value = (one.squeeze(-2) for one in (key, value))
        return self.q_layernorm(query), self.k_layernorm(key), value, gate

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:  # [t, 1, heads * d], [t, 1, heads, d]
        """Return `x` times the gate. Megatron's own form is compiled by torch, which costs CPU time."""
        return x * torch.sigmoid(gate.reshape(x.shape))


class PackedAttention(nn.Module):
    """Core attention that Megatron's `SelfAttention` calls; documents of a pack never see each other.

    Padding (the positions between a document's real and padded length) gives zeros and is never attended to.
    With context parallelism a rank's queries attend to the keys and values of the whole pack, all-gathered
    over the group.
    """

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type,
        attention_type: str,
        cp_comm_type=None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,  # sizes follow from the tensors
        v_channels: int | None = None,
        pg_collection=None,
    ):
        super().__init__()
        self.scale = softmax_scale
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if has_window else None
        self.deterministic = config.deterministic_mode  # in backward, the other kernels add up in any order
        self.shard, self.cp_group = RowShard(), None
        if config.context_parallel_size > 1:
            self.cp_group = pg_collection.cp
            self.shard = RowShard(self.cp_group.rank(), config.context_parallel_size)

    def forward(
        self,
        query: Tensor,  # [t, heads, d], t the tokens of this context-parallel rank
        key: Tensor,  # [t, groups, d]
        value: Tensor,  # [t, groups, v]
        attention_mask: Tensor | None,
        /,
        *,
        attn_mask_type=None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedDocuments,
    ) -> Tensor:  # [t, heads * v]
        assert attention_mask is None and attention_bias is None, (
            "packs carry their structure in packed_seq_params"
        )
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        spans = packed_seq_params.cu_seqlens_q_padded.diff().tolist()
        if not self.shard.is_whole:
            key, value = self._whole_pack(key, value, packed_seq_params.cu_seqlens_q_padded)
        queries = query.split([span // self.shard.size for span in spans])
        # Empty outputs, but part of the graph: a rank with padding only must join the reduction in backward.
        outputs = [tensor[:0].reshape(0, query.size(1), value.size(2)) for tensor in (key, value)]
        for length, span, q, k, v in zip(
            lengths, spans, queries, key.split(spans), value.split(spans), strict=True
        ):
            parts = self.shard.parts(span)
            for (first, last), part in zip(
                parts, q.split([last - first for first, last in parts]), strict=True
            ):
                end = max(first, min(last, length))  # the end of the part's real tokens
                attended = self._attend(part[: end - first], k[:end], v[:end])
                outputs.append(F.pad(attended, (0, 0, 0, 0, 0, last - end)))
        return torch.cat(outputs).flatten(1)

    def _whole_pack(self, key: Tensor, value: Tensor, cu_seqlens_padded: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all ranks in document order.

        Shapes: [t, groups, d] and [t, groups, v] -> the same with cp * t rows. All-gather over context
        parallel. Backward: reduce-scatter SUM, each rank gets the gradient of its rows.
        """
        gathered = gather_from_sequence_parallel_region(torch.cat((key, value), dim=-1), group=self.cp_group)
        shards = (RowShard(rank, self.shard.size) for rank in range(self.shard.size))
        rows = [shard.rows(cu_seqlens_padded) for shard in shards]
        order = torch.cat(rows).argsort().to(key.device)  # the inverse of the permutation that the ranks hold
        return gathered[order].split((key.size(-1), value.size(-1)), dim=-1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute the causal attention of the last n of m tokens.

        Shapes: [n, heads, d], [m, groups, d], [m, groups, v] -> [n, heads, v].
        """
        n, m = query.size(0), key.size(0)
        if n == 0:
            return query.reshape(0, query.size(1), value.size(2))
        masked = n < m or (self.window is not None and m > self.window)
        # The kernels for these cases take no groups of heads.
        is_wide = query.size(-1) > WIDEST_HEAD
        if query.is_cuda and (masked or is_wide or query.dtype == torch.float32):
            key, value = (x.repeat_interleave(query.size(1) // x.size(1), dim=1) for x in (key, value))
        with sdpa_kernel(SDPBackend.MATH if self.deterministic else KERNELS):
            output = F.scaled_dot_product_attention(
                query.transpose(0, 1)[None],
                key.transpose(0, 1)[None],
                value.transpose(0, 1)[None],
                attn_mask=_causal_mask(n, m, self.window or m, query.device) if masked else None,
                is_causal=not masked,
                scale=self.scale,
                enable_gqa=query.size(1) != key.size(1),
            )
        return output[0].transpose(0, 1)


def _causal_mask(n: int, m: int, window: int, device: torch.device) -> Tensor:
    """Return the mask, bool [n, m], of the last n of m positions.

    The query at position i sees the key at position j if 0 <= i - j < window.
    """
    position = torch.arange(m, device=device)
    distance = position[m - n :, None] - position[None, :]
    return (distance >= 0) & (distance < window)


def sharded_by_heads(
    module: nn.Module,
    parameter: str,  # name of the module's vector
    tp_group: ProcessGroup | None,
    prefix: str,
    sharded_offsets: tuple[tuple[int, int, int], ...],
    metadata: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return Megatron's sharded state of a module whose one parameter tensor parallelism cuts by heads."""
    own = module.state_dict(prefix="", keep_vars=True)
    return sharded_parameters(own, {parameter: 0}, tp_group, prefix, sharded_offsets, metadata)


def sharded_parameters(
    parameters: dict[str, Tensor],  # by their names in the module
    axes: dict[str, int],  # dimension that tensor parallelism cuts, of those that are cut
    tp_group: ProcessGroup | None,
    prefix: str,
    sharded_offsets: tuple[tuple[int, int, int], ...],
    metadata: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return Megatron's sharded state of some parameters of a module."""
    return make_sharded_tensors_for_checkpoint(
        parameters,
        prefix,
        axes,
        sharded_offsets,
        tp_group=tp_group,
        dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
    )
