"""Check the bounds of packs: few, never too narrow, and of the same documents."""

from __future__ import annotations

import pytest
import torch

from mkd.models.graphs.bounds import Bounds, doubled_to, filled
from mkd.models.packed import packed_documents


def pack(*lengths: int):
    borders = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return packed_documents(borders, borders, max(lengths), padding_joins_document=True)


@pytest.mark.parametrize(("number", "bound"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (1000, 1024)])
def test_bounds_double(number, bound):
    assert doubled_to(number, 4) == bound


def test_similar_packs_have_the_same_bounds():
    one, other = pack(300, 400, 100, 200, 24), pack(512, 128, 128, 128, 64, 64)
    assert Bounds.of(one, 1024) == Bounds.of(other, 1024) == Bounds(1024, 8, 512)
    assert Bounds.of(pack(1024), 1024) == Bounds(1024, 4, 1024)
    assert Bounds.of(one, 512) != Bounds.of(one, 1024)  # rows differ in shape


@pytest.mark.parametrize("lengths", [(300, 400, 100, 200, 24), (1024,), (256,) * 4])
def test_documents_without_tokens_fill_the_borders(lengths):
    packed = pack(*lengths)
    bounds = Bounds.of(packed, 1024)
    full = filled(packed, bounds)
    for borders in (full.cu_seqlens_q, full.cu_seqlens_kv_padded, full.cu_seqlens_real):
        assert borders.dtype == torch.int32 and len(borders) == bounds.documents + 1
        spans = borders.diff().tolist()
        assert spans[: len(lengths)] == list(lengths) and not any(spans[len(lengths) :])
    assert full.max_seqlen_q == full.max_seqlen_kv == bounds.longest >= max(lengths)
    assert packed.cu_seqlens_q.numel() == len(lengths) + 1  # the pack's own borders stay
