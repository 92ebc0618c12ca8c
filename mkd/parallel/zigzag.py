"""The rows of a pack that each context-parallel rank holds, the same for data and attention.

Every document is cut into `2 * size` equal pieces. Rank r holds pieces r and 2 * size - 1 - r, so that a
causal mask gives all ranks the same work. Transformer Engine, whose attention runs on GPUs, divides documents
in the same way (`thd_get_partitioned_indices`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowShard:
    """The part of every row of packs that `rank` of `size` processes holds; by default all of it."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size

    @property
    def is_whole(self) -> bool:
        """True if no other process shares the row."""
        return self.size == 1

    def parts(self, span: int) -> list[tuple[int, int]]:
        """Return the [first, last) positions that this shard has of a document of `span` padded tokens."""
        if self.is_whole:
            return [(0, span)]
        piece, rest = divmod(span, 2 * self.size)
        assert not rest, f"a span of {span} tokens is not a multiple of {2 * self.size}"
        return [(index * piece, (index + 1) * piece) for index in self._pieces]

    def rows(
        self,
        cu_seqlens_padded: Tensor,  # [documents + 1] int32, of the whole pack; the last is t
    ) -> Tensor:  # [t / size] int64, CPU
        """Return the rows of a pack of t tokens that this shard has: document after document, ascending."""
        borders = cu_seqlens_padded.tolist()
        return torch.cat(
            [
                torch.arange(start + first, start + last)
                for start, stop in zip(borders[:-1], borders[1:], strict=True)
                for first, last in self.parts(stop - start)
            ]
        )

    def places(self, cu_seqlens_padded: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return the document of each of the shard's `num_tokens` = t / size tokens, and the position in it.

        Both are [t / size] on the device of `cu_seqlens_padded`, which nothing waits for.
        """
        held = cu_seqlens_padded // self.size  # borders of the documents' parts in this shard
        row = torch.arange(num_tokens, device=held.device, dtype=held.dtype)
        document = torch.searchsorted(held[1:].contiguous(), row, right=True)
        place = row - held[document]
        if self.is_whole:
            return document, place
        piece = cu_seqlens_padded.diff()[document] // (2 * self.size)
        first, second = self._pieces
        return document, place + piece * torch.where(place < piece, first, second - 1)

    @property
    def _pieces(self) -> tuple[int, int]:
        """Numbers of the two pieces of a document in this shard."""
        return self.rank, 2 * self.size - 1 - self.rank
