"""Document borders of one pack in the form that Megatron's attention and rotary embeddings take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class PackedDocuments(PackedSeqParams):
    """Megatron's THD description, and what mkd's own parts of the layers need to know of the pack."""

    cu_seqlens_real: Tensor | None = None  # [documents + 1] int32, without padding (for LongRoPE and routers)
    documents_of_tokens: Tensor | None = None  # for routers; see moe/token_documents.py
    token_positions: Tensor | None = None  # [t] int64, of single tokens; None: from 0 in documents
    positions: Tensor | None = None  # [3, t] int64, rotary positions of this rank's rows, for sections
    query_factors: Tensor | None = None  # [t, 1, 1, 1] fp32, of this rank's rows; None: all are 1
    image_rows: Tensor | None = None  # [n] int64, rows of this rank that hold image tokens
    block_masks: dict[int | None, Any] = field(default_factory=dict)  # window -> mask; see sink_attention.py
    rows: Any = None  # `PackRows` of the pack once a mixer has read it; see mixers/pack_rows.py


def packed_documents(
    cu_seqlens: Tensor,  # [documents + 1] int32, without padding
    cu_seqlens_padded: Tensor,  # [documents + 1] int32, with padding
    max_seqlen: int,  # longest document with padding, tokens
    padding_joins_document: bool = False,
) -> PackedDocuments:
    """Describe the documents of one THD row.

    The row is the whole one, even on context-parallel ranks that hold a part of it. If
    `padding_joins_document`, padding counts as part of its document, because Transformer Engine's fastest
    kernels need contiguous segments. Attention is causal and padding has no loss, so no other position and no
    gradient changes.
    """
    attended = cu_seqlens_padded if padding_joins_document else cu_seqlens
    return PackedDocuments(
        qkv_format="thd",
        cu_seqlens_q=attended,
        cu_seqlens_kv=attended,
        cu_seqlens_q_padded=cu_seqlens_padded,
        cu_seqlens_kv_padded=cu_seqlens_padded,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        cu_seqlens_real=cu_seqlens,
    )
