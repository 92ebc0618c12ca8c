"""Check synthetic documents: the same tokens and the same loss in every way of batching."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tools.benchmarks.synthetic_documents import (
    ChatLengths,
    document_lengths,
    full_pack,
    packed_batches,
    padded_batches,
    random_documents,
)

CHAT = ChatLengths(median=40, longest=200)


def pairs(batches) -> list[tuple[int, int]]:
    """Return (token, label) of all loss positions, sorted."""
    found = []
    for batch in batches:
        rows = batch.loss_mask[0] != 0
        found += list(zip(batch.tokens[0][rows].tolist(), batch.labels[0][rows].tolist(), strict=True))
    return sorted(found)


@pytest.fixture
def documents():
    random = np.random.default_rng(0)
    return random_documents(CHAT.draw(40, random), 500, random)


def test_all_batchings_have_the_same_loss_tokens(documents):
    wanted = sorted((a, b) for d in documents for a, b in zip(d[:-1].tolist(), d[1:].tolist(), strict=True))
    for batches in (
        packed_batches(documents, 256),
        padded_batches(documents, 1),
        padded_batches(documents, 8),
    ):
        assert pairs(batches) == wanted
        assert sorted(n for n in document_lengths(batches) if n) == sorted(map(len, documents))


def test_padded_batches_run_the_head_over_padding(documents):
    for batch in padded_batches(documents, 8):
        spans = batch.cu_seqlens_padded.diff()
        assert torch.equal(spans, spans[:1].expand(8)) and spans[0] == batch.cu_seqlens.diff().max()
        assert torch.equal(batch.loss_rows, torch.arange(batch.tokens.numel()))
    assert sum(document_lengths([batch], padded=True)) == batch.tokens.numel()


def test_a_full_pack_has_no_padding():
    random = np.random.default_rng(1)
    for seq_length in (64, 65, 257):
        batch = full_pack(seq_length, 500, CHAT, random)
        assert batch.tokens.numel() == seq_length == sum(document_lengths([batch]))
        assert min(document_lengths([batch])) >= 2


def test_lengths_are_like_conversations():
    lengths = ChatLengths(600, 4096).draw(20_000, np.random.default_rng(2))
    assert 570 < np.median(lengths) < 630 and lengths.max() == 4096 and lengths.min() >= 2
