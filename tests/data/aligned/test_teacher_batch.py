"""A teacher's packs as one row: rows of chunks across packs, kinds in order, empty packs, devices."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import torch

from mkd.data.aligned.teacher_batch import PackChunks, TeacherPack, collate_teacher
from mkd.data.teacher_input import RowCut
from mkd.parallel.tensor_records import map_tensors
from mkd.parallel.zigzag import RowShard
from mkd.xtoken.chunks import MANY_TO_ONE, ONE_TO_MANY, ONE_TO_ONE

STUDENT_LABELS = np.arange(100, 112)  # of two packs of 4 and an empty one


def chunks_of(*rows, supports=()):
    """Build chunks from (student row, tokens, teacher row, tokens, kind, pairs)."""
    columns = [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]
    columns[4] = columns[4].astype(np.int8)
    return PackChunks(*columns, *np.array(supports, dtype=np.int64).reshape(-1, 2).T)


def packs():
    first = chunks_of((0, 1, 0, 2, ONE_TO_MANY, 2), (1, 1, 2, 1, ONE_TO_ONE, 0), supports=[(7, 8), (9, 10)])
    second = chunks_of((0, 2, 0, 1, MANY_TO_ONE, 1), (2, 1, 1, 1, ONE_TO_ONE, 0), supports=[(5, 6)])
    row = np.arange(8)
    return [
        TeacherPack(row + 10, row + 11, np.array([3, 1]), np.array([4, 4]), first),
        TeacherPack(row + 20, row + 21, np.array([5]), np.array([8]), second),
        TeacherPack(row * 0, row * 0, np.array([0]), np.array([8]), PackChunks.empty()),
    ]


def test_packs_become_one_row_and_one_list_of_chunks():
    batch = collate_teacher(packs(), STUDENT_LABELS)
    assert batch.tokens.tolist() == [[*range(10, 18), *range(20, 28), *[0] * 8]]
    assert batch.position_ids.tolist() == [[*range(4), *range(4), *range(8), *range(8)]]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 9, 9] and batch.cu_seqlens_padded.tolist() == [
        0,
        4,
        8,
        16,
        24,
    ]
    assert batch.max_seqlen == 8 and batch.cu_seqlens.dtype == batch.cu_seqlens_padded.dtype == torch.int32
    chunks = batch.chunks
    assert (
        chunks.kinds.tolist() == [ONE_TO_ONE, ONE_TO_ONE, ONE_TO_MANY, MANY_TO_ONE]
        and chunks.kinds.dtype == np.int8
    )
    assert chunks.student.rows.tolist() == [1, 6, 0, 4, 5] and chunks.teacher.rows.tolist() == [2, 9, 0, 1, 8]
    assert chunks.student.labels.tolist() == [101, 106, 100, 104, 105]
    assert chunks.teacher.labels.tolist() == [13, 22, 11, 12, 21]
    assert chunks.student.offsets.tolist() == chunks.student.host_offsets.tolist() == [0, 1, 2, 3, 5]
    assert chunks.teacher.offsets.tolist() == chunks.teacher.host_offsets.tolist() == [0, 1, 2, 4, 5]
    assert (
        chunks.packs.tolist() == [0, 1, 0, 1]
        and chunks.weights.tolist() == [1.0] * 4
        and chunks.num_chunks == 4
    )
    assert chunks.support_offsets.tolist() == [0, 0, 0, 2, 3] and chunks.support_chunks.tolist() == [2, 2, 3]
    assert chunks.support_student.tolist() == [7, 9, 5] and chunks.support_teacher.tolist() == [8, 10, 6]
    assert chunks.student.exchange is None and chunks.weights.dtype == torch.float32


def test_packs_without_chunks():
    chunks = collate_teacher([packs()[2]] * 2, STUDENT_LABELS).chunks
    assert chunks.num_chunks == len(chunks.kinds) == 0 and chunks.kinds.dtype == np.int8
    assert chunks.student.offsets.tolist() == [0] and chunks.support_offsets.tolist() == [0]
    assert (
        chunks.student.rows.dtype
        == chunks.teacher.labels.dtype
        == chunks.support_student.dtype
        == torch.int64
    )


def tensors_of(value):
    """Return all tensors of a batch and of its parts."""
    parts = [getattr(value, field.name) for field in fields(value)]
    own = [part for part in parts if isinstance(part, torch.Tensor)]
    return own + [
        tensor for part in parts if hasattr(part, "__dataclass_fields__") for tensor in tensors_of(part)
    ]


def test_all_tensors_move_and_nothing_else_changes():
    batch = collate_teacher(packs(), STUDENT_LABELS)
    borders = torch.tensor([0, 4, 8, 12], dtype=torch.int32)
    cut = RowCut(RowShard(0, 2), borders, loss_places=torch.zeros(0, dtype=torch.int64))
    batch = replace(batch, chunks=batch.cut(cut).chunks)
    moved = map_tensors(batch, lambda tensor: tensor.to("meta"))
    assert {tensor.device.type for tensor in tensors_of(moved)} == {"meta"}
    assert len(tensors_of(moved)) == len(tensors_of(batch)) == 17
    assert moved.max_seqlen == 8 and moved.chunks.num_chunks == 4 and moved.chunks.kinds is batch.chunks.kinds
