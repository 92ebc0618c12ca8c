"""Slices of chunks: every chunk once, one kind each, and index tensors that name the right tokens."""

from __future__ import annotations

import pytest
import torch

from mkd.xtoken.slices import ChunkSlice, slice_ranges
from tests.xtoken.chunk_cases import chunk_batch, random_case, relation_of, vocabulary_of

COUNTS = (7, 4, 0, 3)


@pytest.mark.parametrize("most", [1, 4, 5, 100])
def test_ranges(most):
    batch, _, _ = chunk_batch(relation_of(35, 42, 20), COUNTS, seed=0)
    ranges = list(slice_ranges(batch, most))
    assert [i for part in ranges for i in part] == list(range(sum(COUNTS)))
    for part in ranges:
        assert len(set(batch.kinds[part.start : part.stop])) == 1
        rows = [
            side.host_offsets[part.stop] - side.host_offsets[part.start]
            for side in (batch.student, batch.teacher)
        ]
        assert len(part) == 1 or max(rows) <= most


def test_tokens_of_a_slice():
    case = random_case(COUNTS)
    batch, vocabulary = case.chunks, vocabulary_of(case, {}, 0, 2)[0]
    for part in slice_ranges(batch, 7):
        piece = ChunkSlice.of(batch, part, vocabulary)
        for side, rows in ((batch.student, piece.student), (batch.teacher, piece.teacher)):
            bounds = side.host_offsets[part.start : part.stop + 1] - side.host_offsets[part.start]
            bases = bounds[1:] - 1
            assert rows.base.tolist() == bases.tolist()
            assert rows.others.tolist() == [i for i in range(bounds[-1]) if i not in bases]
            assert rows.other_chunks.tolist() == rows.chunks[rows.others].tolist()
            assert rows.chunks.bincount(minlength=len(part)).tolist() == (bounds[1:] - bounds[:-1]).tolist()
        own = (batch.support_chunks >= part.start) & (batch.support_chunks < part.stop)
        assert torch.equal(piece.pair_chunks + part.start, batch.support_chunks[own])
        assert torch.equal(piece.pair_teacher, vocabulary.teacher_places[batch.support_teacher[own]])
