"""The document of every token, for balance losses.

Megatron hands `padding_mask` from the model to the routers and saves it when it recomputes a layer. mkd sends
the documents along this way. Kept on a module, they would be those of a later micro-batch by then.
"""

from __future__ import annotations

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
    spans = packed.cu_seqlens_q_padded.diff()
    lengths = packed.cu_seqlens_real.diff()
    held = packed.cu_seqlens_q_padded // context.cp_size  # borders of the documents' parts on this process
    row = torch.arange(num_tokens, device=held.device, dtype=held.dtype)
    document = torch.searchsorted(held[1:].contiguous(), row, right=True)
    place = row - held[document]
    piece = spans[document] // (2 * context.cp_size)  # each process has two pieces (see zigzag.py)
    first, last = context.cp_rank, 2 * context.cp_size - 1 - context.cp_rank
    position = place + piece * torch.where(place < piece, first, last - 1)
    if context.cp_size == 1:
        position = place
    ids = torch.where(position < lengths[document], document, -1).to(torch.int32)
    if sequence_parallel:
        ids = ids.chunk(context.tp_size)[context.tp_rank]
    return torch.cat((ids, lengths.to(torch.int32)))


def split_documents(documents: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return (document of each of `num_tokens` tokens, real tokens of each document), both int32."""
    return documents[:num_tokens], documents[num_tokens:]
