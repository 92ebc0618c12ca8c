"""Check the rows of context-parallel ranks against Transformer Engine's rule and the library itself."""

from __future__ import annotations

import pytest
import torch

from mkd.parallel.zigzag import RowShard

SPANS = (16, 8, 24, 0, 8)


def borders(spans=SPANS):
    return torch.tensor([0, *spans]).cumsum(0).int()


def kernel_rows(spans, rank, size):
    """Return rows one by one, as `thd_get_partitioned_indices` computes them.

    The second half of a rank's rows of a document lies further back in it.
    """
    rows, start = [], 0
    for span in spans:
        half = span // size // 2
        for i in range(2 * half):
            rows.append(start + i + half * (rank if i < half else 2 * (size - 1) - rank))
        start += span
    return rows


@pytest.mark.parametrize("size", [2, 4])
def test_rows_are_those_of_transformer_engine(size):
    for rank in range(size):
        rows = RowShard(rank, size).rows(borders())
        assert rows.dtype == torch.int64 and rows.tolist() == kernel_rows(SPANS, rank, size)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_row_is_on_one_rank(size):
    rows = [RowShard(rank, size).rows(borders()) for rank in range(size)]
    assert {len(part) for part in rows} == {sum(SPANS) // size}
    assert torch.cat(rows).sort().values.tolist() == list(range(sum(SPANS)))


def test_ranks_hold_the_same_number_of_causal_pairs():
    pairs = [
        sum(i + 1 for first, last in RowShard(rank, 3).parts(24) for i in range(first, last))
        for rank in range(3)
    ]
    assert pairs == [100, 100, 100]


def test_one_rank_holds_everything_whatever_the_spans():
    assert RowShard(0, 1).rows(borders((3, 0, 5))).tolist() == list(range(8))


def test_spans_must_be_multiples():
    with pytest.raises(AssertionError, match="a span of 6 tokens is not a multiple of 4"):
        RowShard(0, 2).rows(borders((8, 6, 2)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [2, 4])
def test_rows_equal_the_kernel_s(size):
    te = pytest.importorskip("transformer_engine_torch")
    for rank in range(size):
        theirs = te.thd_get_partitioned_indices(borders().cuda(), sum(SPANS), size, rank)
        assert theirs.tolist() == RowShard(rank, size).rows(borders()).tolist()
