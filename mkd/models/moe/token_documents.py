"""The document of every token, for balance losses.

They travel with the description of the pack, which every layer gets, and reach the router as `padding_mask`.
Kept on a module, they would be those of a later micro-batch when a layer is recomputed. Megatron's own way
for `padding_mask` ends at the layers that block recomputation leaves out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mkd.models.packed import PackedDocuments
from mkd.parallel.context import ParallelContext


def token_documents(
    packed: PackedDocuments,
    num_tokens: int,  # t of this context-parallel process
    context: ParallelContext,
    sequence_parallel: bool,
) -> Tensor:
    """Return int32 [t(/tp) + documents], without waiting for the device.

    First the document of each token, -1 for padding; then the number of real tokens of each document, over
    all processes.
    """
    assert packed.cu_seqlens_real is not None, "documents have lengths without padding"
    lengths = packed.cu_seqlens_real.diff()
    document, position = context.row_shard.places(packed.cu_seqlens_q_padded, num_tokens)
    ids = torch.where(position < lengths[document], document, -1).to(torch.int32)
    if sequence_parallel:
        ids = ids.chunk(context.tp_size)[context.tp_rank]
    return torch.cat((ids, lengths.to(torch.int32)))


def give_documents(
    layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a decoder layer in training its documents as `padding_mask`; a forward pre-hook with kwargs."""
    if layer.training:
        kwargs["padding_mask"] = kwargs["packed_seq_params"].documents_of_tokens
    return args, kwargs


def split_documents(documents: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return (document of each of `num_tokens` tokens, real tokens of each document), both int32."""
    return documents[:num_tokens], documents[num_tokens:]
