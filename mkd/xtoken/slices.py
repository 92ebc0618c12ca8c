"""Slices of a chunk batch: as many chunks of one kind as fit, as index tensors, cut on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mkd.xtoken.chunks import KINDS, ONE_TO_ONE, ChunkBatch, ChunkSide
from mkd.xtoken.vocabulary.chunk_vocabulary import ChunkVocabulary


@dataclass(frozen=True)
class SideRows:
    """One model's n tokens of the c chunks of a slice. Rows are counted from the start of the slice.

    The last token of each chunk is the base, whose whole distribution is compared; only p(realised token) of
    the others counts.
    """

    hidden_rows: Tensor  # [n] int64, rows of the hidden states
    places: Tensor  # [n] int64, places of the tokens (see ChunkVocabulary)
    chunks: Tensor  # [n] int64, chunk of each row
    starts: Tensor  # [c] int64, the first row of each chunk
    base: Tensor  # [c] int64
    others: Tensor  # [n - c] int64
    other_chunks: Tensor  # [n - c] int64

    @classmethod
    def of(cls, side: ChunkSide, chunks: range, places: Tensor | None) -> SideRows:
        """Cut out these chunks; `places` of the ids, None if an id is its place.

        Nothing is copied from the device: sizes come from `host_offsets`.
        """
        first, last = (int(side.host_offsets[i]) for i in (chunks.start, chunks.stop))
        offsets = side.offsets[chunks.start : chunks.stop + 1] - first
        counts, index = offsets.diff(), torch.arange(len(chunks), device=offsets.device)
        labels = side.labels[first:last]
        others = last - first - len(chunks)
        other_chunks = index.repeat_interleave(counts - 1, output_size=others)
        # Token i of those other than bases has one base before it for each earlier chunk.
        other_rows = torch.arange(others, device=offsets.device) + other_chunks
        return cls(
            side.rows[first:last],
            labels if places is None else places[labels],
            index.repeat_interleave(counts, output_size=last - first),
            offsets[:-1],
            offsets[1:] - 1,
            other_rows,
            other_chunks,
        )

    def at_starts(self) -> SideRows:
        """Return the first token of each chunk alone."""
        index, none = torch.arange(len(self.starts), device=self.starts.device), self.others[:0]
        rows, places = self.hidden_rows[self.starts], self.places[self.starts]
        return SideRows(rows, places, index, index, index, none, none)


@dataclass(frozen=True)
class ChunkSlice:
    """c chunks of one kind."""

    kind: int
    student: SideRows
    teacher: SideRows
    weights: Tensor  # [c]
    pair_chunks: Tensor  # [p] int64, chunk of each pair of the supports
    pair_student: Tensor  # [p] int64, places
    pair_teacher: Tensor  # [p] int64, places

    def at_starts(self) -> ChunkSlice:
        """Return the first tokens of each chunk alone."""
        student, teacher = self.student.at_starts(), self.teacher.at_starts()
        return replace(self, kind=ONE_TO_ONE, student=student, teacher=teacher)

    @classmethod
    def of(cls, batch: ChunkBatch, chunks: range, vocabulary: ChunkVocabulary) -> ChunkSlice:
        """Cut out these chunks, all of one kind."""
        pairs = slice(*(int(batch.support_offsets[i]) for i in (chunks.start, chunks.stop)))
        return cls(
            int(batch.kinds[chunks.start]),
            SideRows.of(batch.student, chunks, None),
            SideRows.of(batch.teacher, chunks, vocabulary.teacher_places),
            batch.weights[chunks.start : chunks.stop],
            batch.support_chunks[pairs] - chunks.start,
            batch.support_student[pairs],
            vocabulary.teacher_places[batch.support_teacher[pairs]],
        )


def slice_ranges(batch: ChunkBatch, most_rows: int) -> Iterator[range]:
    """Yield ranges of at least one chunk, of one kind, with at most `most_rows` tokens on either side."""
    offsets = batch.student.host_offsets, batch.teacher.host_offsets
    for kind in KINDS:
        first, end = (int(i) for i in np.searchsorted(batch.kinds, (kind, kind + 1)))
        while first < end:
            fitting = (np.searchsorted(side, side[first] + most_rows, side="right") for side in offsets)
            last = min(end, max(first + 1, int(min(fitting)) - 1))
            yield range(first, last)
            first = last
