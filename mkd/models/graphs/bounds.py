"""Document borders of fixed size: a graph has fixed shapes, the documents of packs have not.

The borders are filled up with documents of length 0 at the end of the row, and the longest document may be
shorter than is said. Attention kernels start blocks for every document and position within the bounds; those
without tokens end at once. Bounds far above the pack's own still cost time, above all in backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mkd.models.packed import PackedDocuments, packed_documents

LEAST_DOCUMENTS = 4
LEAST_LENGTH = 256


@dataclass(frozen=True)
class Bounds:
    """Room for the documents of a pack. Packs with similar documents have the same bounds."""

    tokens: int  # of this rank's row, exactly
    documents: int
    longest: int  # tokens, with padding

    @classmethod
    def of(cls, packed: PackedDocuments, tokens: int) -> Bounds:
        """Return the bounds of a row of which this rank has `tokens` tokens: twice what it needs at most."""
        documents = doubled_to(packed.cu_seqlens_q_padded.numel() - 1, LEAST_DOCUMENTS)
        return cls(tokens, documents, doubled_to(packed.max_seqlen_q, LEAST_LENGTH))

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.documents} documents of at most {self.longest}"


def doubled_to(number: int, least: int) -> int:
    """Return the smallest of `least`, 2 `least`, 4 `least`, ... that is not below `number`."""
    bound = least
    while bound < number:
        bound *= 2
    return bound


def filled(packed: PackedDocuments, bounds: Bounds) -> PackedDocuments:
    """Return the same documents with the borders and the longest document of `bounds`, in new tensors."""

    def filled_up(borders: Tensor) -> Tensor:
        return torch.cat((borders, borders[-1:].expand(bounds.documents + 1 - borders.numel())))

    padded = filled_up(packed.cu_seqlens_q_padded)
    real = padded if packed.cu_seqlens_real is None else filled_up(packed.cu_seqlens_real)
    full = packed_documents(real, padded, bounds.longest, padding_joins_document=True)
    if packed.documents_of_tokens is not None:  # its last values are the documents' lengths
        missing = padded.numel() - packed.cu_seqlens_q_padded.numel()
        full.documents_of_tokens = F.pad(packed.documents_of_tokens, (0, missing))
    return full
