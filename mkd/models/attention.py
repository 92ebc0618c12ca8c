"""Packed (THD) causal attention for the local layer spec: one SDPA call per document."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mkd.models.packed import PackedDocuments


class PackedAttention(nn.Module):
    """Core attention that Megatron's `SelfAttention` calls; documents of a pack never see each other.

    Padding (the positions between a document's real and padded length) gives zeros and is never attended to.
    """

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type,
        attention_type: str,
        cp_comm_type=None,
        softmax_scale: float | None = None,
        pg_collection=None,
    ):
        super().__init__()
        self.scale = softmax_scale
        self.window = None if config.window_size is None else config.window_size[0] + 1

    def forward(
        self,
        query: Tensor,  # [t, heads, d]
        key: Tensor,  # [t, groups, d]
        value: Tensor,  # [t, groups, d]
        attention_mask: Tensor | None,
        /,
        *,
        attn_mask_type=None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedDocuments,
    ) -> Tensor:  # [t, heads * d]
        assert attention_mask is None and attention_bias is None, "packs carry their structure in packed_seq_params"
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        spans = packed_seq_params.cu_seqlens_q_padded.diff().tolist()
        outputs = []
        for length, span, q, k, v in zip(
            lengths, spans, query.split(spans), key.split(spans), value.split(spans), strict=True
        ):
            document = self._document(q[:length], k[:length], v[:length])
            outputs.append(F.pad(document, (0, 0, 0, 0, 0, span - length)))
        return torch.cat(outputs).flatten(1)

    def _document(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention of one document of n tokens: [n, heads, d], [n, groups, d] twice -> [n, heads, d]."""
        n = query.size(0)
        if n == 0:
            return query
        windowed = self.window is not None and n > self.window
        output = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=_window_mask(n, self.window, query.device) if windowed else None,
            is_causal=not windowed,
            scale=self.scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return output[0].transpose(0, 1)


def _window_mask(n: int, window: int, device: torch.device) -> Tensor:
    """bool [n, n]: query i sees key j when 0 <= i - j < window."""
    position = torch.arange(n, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)
