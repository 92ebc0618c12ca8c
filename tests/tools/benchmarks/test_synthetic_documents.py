"""Check packs of synthetic documents: tokens, loss and lengths."""

from __future__ import annotations

import numpy as np
import pytest

from tools.benchmarks.synthetic_documents import (
    ChatLengths,
    document_lengths,
    full_pack,
    packed_batches,
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


def test_packs_have_the_loss_tokens_of_their_documents(documents):
    wanted = sorted((a, b) for d in documents for a, b in zip(d[:-1].tolist(), d[1:].tolist(), strict=True))
    batches = packed_batches(documents, 256)
    assert pairs(batches) == wanted
    assert sorted(n for n in document_lengths(batches) if n) == sorted(map(len, documents))


def test_a_full_pack_has_no_padding():
    random = np.random.default_rng(1)
    for seq_length in (64, 65, 257):
        batch = full_pack(seq_length, 500, CHAT, random)
        assert batch.tokens.numel() == seq_length == sum(document_lengths([batch]))
        assert min(document_lengths([batch])) >= 2


def test_lengths_are_like_conversations():
    lengths = ChatLengths(600, 4096).draw(20_000, np.random.default_rng(2))
    assert 570 < np.median(lengths) < 630 and lengths.max() == 4096 and lengths.min() >= 2
