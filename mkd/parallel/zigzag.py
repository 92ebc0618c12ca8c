"""The rows of a pack that each context-parallel rank holds, the same for data and attention.

Every document is cut into `2 * size` equal pieces. Rank r holds pieces r and 2 * size - 1 - r, so that a
causal mask gives all ranks the same work. Transformer Engine, whose attention runs on GPUs, divides documents
in the same way (`thd_get_partitioned_indices`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def document_parts(span: int, rank: int, size: int) -> list[tuple[int, int]]:
    """Return the [first, last) positions that `rank` holds of a document of `span` padded tokens."""
    if size == 1:
        return [(0, span)]
    piece, rest = divmod(span, 2 * size)
    assert not rest, f"a span of {span} tokens is not a multiple of {2 * size}"
    return [(index * piece, (index + 1) * piece) for index in (rank, 2 * size - 1 - rank)]


def context_parallel_rows(
    cu_seqlens_padded: Tensor,  # [documents + 1] int32, of the whole pack; the last is t
    rank: int,
    size: int,
) -> Tensor:  # [t / size] int64, CPU
    """Return the rows of a pack of t tokens that `rank` holds: document after document, each ascending."""
    borders = cu_seqlens_padded.tolist()
    return torch.cat(
        [
            torch.arange(start + first, start + last)
            for start, stop in zip(borders[:-1], borders[1:], strict=True)
            for first, last in document_parts(stop - start, rank, size)
        ]
    )
