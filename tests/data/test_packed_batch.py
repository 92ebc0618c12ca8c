"""A micro-batch of packs as one row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mkd.data.batch import Pack, collate, empty_pack


def pack_of(lengths, spans, sample_id=0):
    size = sum(spans)
    mask = np.zeros(size, dtype=np.float32)
    mask[:2] = 1
    return Pack(np.arange(size) + 10, np.arange(size) + 11, mask, np.array(lengths), np.array(spans), sample_id)


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


def test_to_moves_all_tensors_and_nothing_else():
    batch = collate([pack_of([2], [2])])
    moved = batch.to("meta")
    names = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "cu_seqlens_padded")
    assert {getattr(moved, name).device.type for name in names} == {"meta"}
    assert (moved.max_seqlen, moved.num_loss_tokens, moved.sample_ids) == (2, 2, (0,))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_batches_arrive():
    batch = collate([pack_of([2], [2])]).pin_memory()
    assert batch.tokens.is_pinned() and batch.to("cuda").tokens.cpu().tolist() == [[10, 11]]
