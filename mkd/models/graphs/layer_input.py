"""The tensors that the layers of a part read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mkd.models.packed import PackedDocuments, packed_documents


@dataclass(frozen=True)
class LayerInput:
    """Input of the layers of a part: one pack's hidden state, rotary angles and borders."""

    hidden: Tensor  # [t(/tp), 1, h]
    angles: Tensor | None  # see rope.py
    packed: PackedDocuments  # within bounds; see `bounds.filled`

    def fixed(self, hidden: Tensor) -> LayerInput:
        """Return a copy that graphs read, with `hidden` in the place of the hidden state."""
        borders = self.packed.cu_seqlens_q_padded.clone()
        packed = packed_documents(borders, borders, self.packed.max_seqlen_q, padding_joins_document=True)
        if self.packed.documents_of_tokens is not None:
            packed.documents_of_tokens = self.packed.documents_of_tokens.clone()
        return LayerInput(hidden, None if self.angles is None else self.angles.clone(), packed)

    def take(self, other: LayerInput) -> None:
        """Copy angles and borders of another pack with the same bounds."""
        if self.angles is not None:
            self.angles.copy_(other.angles)
        self.packed.cu_seqlens_q_padded.copy_(other.packed.cu_seqlens_q_padded)
        if self.packed.documents_of_tokens is not None:
            self.packed.documents_of_tokens.copy_(other.packed.documents_of_tokens)
