"""Pieces and packs: every token once, labels across cuts, and packs that are full."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from mkd.data.batch import as_row, cumulative, position_ids
from mkd.data.packing.best_fit import pack_pieces
from mkd.data.packing.cutting import cut_documents, padded_lengths


def rows(pieces):
    return list(zip(pieces.document, pieces.offset, pieces.length, pieces.num_labels, strict=True))


def test_split_keeps_the_label_of_the_next_piece():
    pieces = cut_documents(np.array([3, 10, 8]), 5, 4)
    assert rows(pieces) == [
        (5, 0, 3, 2),
        (6, 0, 4, 4),
        (6, 4, 4, 4),
        (6, 8, 2, 1),
        (7, 0, 4, 4),
        (7, 4, 4, 3),
    ]


def test_a_single_token_at_the_end_has_no_label_and_is_left_out():
    assert rows(cut_documents(np.array([5, 1, 0]), 0, 4)) == [(0, 0, 4, 4)]


@pytest.mark.parametrize("seed", range(5))
def test_split_has_n_minus_1_labels_and_every_token_that_is_needed(seed):
    lengths = np.random.default_rng(seed).integers(0, 50, 300)
    pieces = cut_documents(lengths, 0, 8)
    labels = np.bincount(pieces.document, pieces.num_labels, minlength=300)
    assert np.array_equal(labels, np.maximum(lengths - 1, 0))
    seen = [set() for _ in lengths]
    for document, offset, length, _ in rows(pieces):
        span = set(range(offset, offset + length))
        assert 0 < length <= 8 and not span & seen[document]
        seen[document] |= span
    for n, tokens in zip(lengths, seen, strict=True):
        assert set(range(n)) - tokens <= {n - 1}  # only a last token that starts a piece may be left out


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("pack", ["bfd", "none"])
def test_every_piece_is_in_one_pack_and_fits(seed, pack):
    lengths = np.random.default_rng(seed).integers(1, 65, 1000)
    packs = pack_pieces(lengths, 64, pack)
    assert sorted(packs.piece_ids) == list(range(1000))
    sums = np.add.reduceat(lengths[packs.piece_ids], packs.offsets[:-1])
    assert sums.max() <= 64 and packs.offsets[-1] == 1000
    if pack == "none":
        assert len(packs) == 1000 and np.array_equal(packs.piece_ids, np.arange(1000))
    else:
        assert len(packs) <= 11 / 9 * -(-lengths.sum() // 64) + 1


def test_best_fit_decreasing_by_hand():
    packs = pack_pieces(np.array([2, 7, 3, 5, 8, 1]), 10, "bfd")
    contents = [
        packs.piece_ids[a:b].tolist() for a, b in zip(packs.offsets[:-1], packs.offsets[1:], strict=True)
    ]
    assert contents == [[0, 4], [1, 2], [3, 5]]  # 8+2, 7+3, 5+1: ordered by first piece


def test_short_documents_fill_packs():
    lengths = np.random.default_rng(0).integers(1, 400, 20_000)
    packs = pack_pieces(lengths, 2048, "bfd")
    assert lengths.sum() / (len(packs) * 2048) > 0.999


def test_packing_is_deterministic_and_handles_nothing():
    lengths = np.random.default_rng(0).integers(1, 65, 500)
    first, second = pack_pieces(lengths, 64, "bfd"), pack_pieces(lengths, 64, "bfd")
    assert np.array_equal(first.piece_ids, second.piece_ids) and np.array_equal(first.offsets, second.offsets)
    assert len(pack_pieces(lengths[:0], 64, "bfd")) == 0


def test_a_hundred_thousand_documents_take_a_second():
    lengths = np.random.default_rng(0).lognormal(6, 1, 100_000).astype(np.int64) + 2
    start = time.perf_counter()
    pieces = cut_documents(lengths, 0, 4096)
    pack_pieces(pieces.length, 4096, "bfd")
    assert time.perf_counter() - start < 5  # 0.1 s on an idle machine


def test_padded_lengths():
    assert padded_lengths(np.array([1, 4, 5]), 4).tolist() == [4, 4, 8]
    assert padded_lengths(np.array([1, 4, 5]), 1).tolist() == [1, 4, 5]


def test_rows_of_documents():
    spans = np.array([3, 0, 2])
    assert position_ids(spans).tolist() == [[0, 1, 2, 0, 1]] and position_ids(spans).dtype == torch.int64
    assert cumulative(spans).tolist() == [0, 3, 3, 5] and cumulative(spans).dtype == torch.int32
    assert as_row(spans).shape == (1, 3)
