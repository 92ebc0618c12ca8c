"""A micro-batch of packs as one row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mkd.data.aligned.teacher_batch import PackChunks, TeacherPack
from mkd.data.batch import Pack, collate, empty_pack
from mkd.data.teacher_input import SharedTokens
from mkd.parallel.zigzag import RowShard


def pack_of(lengths, spans, sample_id=0):
    size = sum(spans)
    mask = np.zeros(size, dtype=np.float32)
    mask[:2] = 1
    return Pack(
        np.arange(size) + 10, np.arange(size) + 11, mask, np.array(lengths), np.array(spans), sample_id
    )


def test_two_packs_are_one_row():
    batch = collate([pack_of([3, 2], [3, 5], 4), pack_of([8], [8], 9)])
    assert batch.tokens.tolist() == [[*range(10, 18), *range(10, 18)]]
    assert batch.labels.tolist() == [[*range(11, 19), *range(11, 19)]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7]]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 13]
    assert batch.cu_seqlens_padded.tolist() == [0, 3, 8, 16]
    assert (batch.max_seqlen, batch.num_loss_tokens, batch.sample_ids) == (8, 4, (4, 9))
    types = [getattr(batch, name).dtype for name in ("tokens", "labels", "loss_mask", "position_ids")]
    assert types == [torch.int64, torch.int64, torch.float32, torch.int64]
    assert batch.cu_seqlens.dtype == batch.cu_seqlens_padded.dtype == torch.int32


def test_an_empty_pack_is_one_document_without_tokens():
    batch = collate([empty_pack(4, pad_id=7)])
    assert batch.tokens.tolist() == [[7] * 4] and batch.num_loss_tokens == 0 and batch.loss_mask.sum() == 0
    assert batch.cu_seqlens.tolist() == [0, 0] and batch.cu_seqlens_padded.tolist() == [0, 4]
    assert (batch.max_seqlen, batch.sample_ids) == (4, (-1,))


def test_loss_rows_are_the_positions_with_loss():
    batch = collate([pack_of([3, 2], [3, 5]), empty_pack(4, pad_id=7), pack_of([8], [8])])
    assert batch.loss_rows.tolist() == [0, 1, 12, 13] and batch.loss_rows.dtype == torch.int64
    assert batch.pack_loss_tokens == batch.pack_loss_rows == (2, 0, 2)  # packs of any lengths


def test_context_parallel_ranks_share_the_rows():
    """Borders and counts stay those of the whole row; rank r holds parts r and 3 - r of each document."""
    batch = collate([pack_of([3, 6], [4, 8], 4), pack_of([12], [12], 9)])
    first, second = (batch.shard(RowShard(rank, 2)) for rank in range(2))
    assert first.position_ids.tolist() == [[0, 3, 0, 1, 6, 7, 0, 1, 2, 9, 10, 11]]
    assert second.position_ids.tolist() == [[1, 2, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8]]
    assert first.tokens.tolist() == [[10, 13, 14, 15, 20, 21, 10, 11, 12, 19, 20, 21]]
    assert first.labels.tolist() == [[11, 14, 15, 16, 21, 22, 11, 12, 13, 20, 21, 22]]
    assert (first.loss_rows.tolist(), second.loss_rows.tolist()) == ([0, 6, 7], [0])
    for shard in (first, second):
        assert torch.equal(shard.loss_mask[0].nonzero().flatten(), shard.loss_rows)
        assert shard.cu_seqlens.tolist() == [0, 3, 9, 21] and shard.cu_seqlens_padded.tolist() == [
            0,
            4,
            12,
            24,
        ]
        assert (shard.max_seqlen, shard.num_loss_tokens, shard.sample_ids) == (12, 4, (4, 9))


def test_a_single_context_parallel_rank_holds_the_batch():
    batch = collate([pack_of([3, 2], [3, 5])])
    assert batch.shard(RowShard(0, 1)) is batch


def test_teachers_move_with_the_batch():
    chunks = PackChunks(
        *np.array([[1], [1], [0], [1]]), np.array([0], dtype=np.int8), *[np.zeros(0, dtype=np.int64)] * 3
    )
    chunks = replace(chunks, support_counts=np.array([0]))
    part = TeacherPack(np.arange(4), np.arange(4), np.array([3]), np.array([4]), chunks)
    batch = collate([replace(pack_of([3, 2], [3, 5]), teacher_inputs=(SharedTokens(), part))] * 2)
    assert batch.teacher_inputs[0] == SharedTokens() and batch.teacher_inputs[
        1
    ].chunks.student.rows.tolist() == [1, 9]
    moved = batch.to("meta").teacher_inputs
    assert (
        moved[0] == SharedTokens()
        and moved[1].tokens.device.type == moved[1].chunks.teacher.labels.device.type == "meta"
    )


def test_to_moves_all_tensors_and_nothing_else():
    batch = collate([pack_of([2], [2])])
    moved = batch.to("meta")
    names = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "cu_seqlens_padded", "loss_rows")
    assert {getattr(moved, name).device.type for name in names} == {"meta"}
    assert (moved.max_seqlen, moved.num_loss_tokens, moved.sample_ids) == (2, 2, (0,))


@pytest.mark.gpu
def test_pinned_batches_arrive():
    batch = collate([pack_of([2], [2])]).pin_memory()
    assert batch.tokens.is_pinned() and batch.to("cuda").tokens.cpu().tolist() == [[10, 11]]
