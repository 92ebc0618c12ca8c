"""Megatron's self-attention with other positions: a rope by layer, none, rows of their own, growing queries.

Megatron hands one tensor of angles to all layers, and turns queries and keys by document.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from mkd.models.packed import PackedDocuments


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
    """Megatron's self-attention that takes the rotary embedding of its layer.

    For models whose layers differ in their embeddings. `rotary_pos_emb` holds all of them, [embeddings, n, 1,
    1, d], because Megatron hands one tensor to all layers.
    """

    def __init__(self, *args: Any, rope_index: int, **options: Any):
        super().__init__(*args, **options)
        self.rope_index = rope_index

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, rotary_pos_emb: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        rope = rotary_pos_emb[self.rope_index]
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=rope, **options)


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
