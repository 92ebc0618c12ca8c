"""Base of terms whose teacher reads a row of its own and is compared on chunks of both rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from mkd.data.aligned.teacher_batch import TeacherBatch
from mkd.data.batch import PackedBatch
from mkd.train.teachers.base import LossInput
from mkd.xtoken.chunks import ChunkBatch


class ChunkedTerm:
    """Base of a term whose rows are the chunks of a batch."""

    name: str
    index: int  # number of the teacher's model in the stage
    can_take_cross_entropy: ClassVar[bool] = False  # that has more rows
    measures: ClassVar[tuple[str, ...]] = ()

    def num_rows(self, batch: PackedBatch) -> int:
        """Return the number of chunks of a micro-batch, those of all context-parallel ranks."""
        return self._chunks(batch).num_chunks

    def num_rows_of(self, batch: PackedBatch, packs: Sequence[int]) -> int:
        """Return how many of the `num_rows` are in the packs of these numbers."""
        of_packs = self._chunks(batch).pack_chunks
        return sum(of_packs[number] for number in packs)

    def rows_of(self, given: LossInput) -> Tensor:
        """Return the chunks of this rank in packs where the teacher has a weight, int64 []."""
        weights = given.pack_weights[self.name]
        return (weights > 0)[self._chunks(given.batch).packs].sum()

    def _chunks(self, batch: PackedBatch) -> ChunkBatch:
        part = batch.teacher_inputs[self.index]
        assert isinstance(part, TeacherBatch), "the data have the rows of this teacher"
        return part.chunks
