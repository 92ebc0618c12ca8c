"""Check the documents of tokens on every context- and sequence-parallel process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mkd.models.moe.token_documents import split_documents, token_documents
from mkd.models.packed import packed_documents
from mkd.parallel.zigzag import RowShard

LENGTHS, SPANS = (5, 0, 16, 7), (8, 8, 16, 16)


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_documents_of_the_tokens(cp_size, joins):
    real, padded = (torch.tensor([0, *values]).cumsum(0).int() for values in (LENGTHS, SPANS))
    packed = packed_documents(real, padded, 16, padding_joins_document=joins)
    whole = torch.full((sum(SPANS),), -1)
    for number, (start, length) in enumerate(zip(padded.tolist(), LENGTHS, strict=False)):
        whole[start : start + length] = number
    for cp_rank in range(cp_size):
        shard = RowShard(cp_rank, cp_size)
        expected = whole[shard.rows(padded)]
        for tp_rank in range(2):
            place = SimpleNamespace(row_shard=shard, tp_rank=tp_rank, tp_size=2)
            ids, lengths = split_documents(
                token_documents(packed, expected.numel(), place, True), expected.numel() // 2
            )
            assert ids.tolist() == expected.chunk(2)[tp_rank].tolist()
            assert lengths.tolist() == list(LENGTHS) and ids.dtype == torch.int32
