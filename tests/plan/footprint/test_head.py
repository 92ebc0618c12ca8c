"""Check the rows of a block of the fused head."""

from __future__ import annotations

import pytest

from mkd.plan.footprint.head import CPU_BLOCK_ROWS, GPU_BLOCK_BYTES, head_block_rows


def test_a_pack_of_8k_tokens_is_one_chunk_of_a_large_vocabulary():
    assert head_block_rows(8192, 151936, 2) == 8192
    assert head_block_rows(8192, 151936, 4) == 4096, "fp32 logits: twice the bytes"


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 100), (0, 100), (8192, 262144), (100_000, 151936), (7, 10**10)]
)
def test_chunks_are_even_and_fit(rows, columns):
    size = head_block_rows(rows, columns, 2)
    assert size == 1 or size * columns * 2 <= GPU_BLOCK_BYTES
    chunks = -(-rows // size)
    assert chunks * size - rows < max(chunks, 1) or rows == 0


def test_on_a_cpu():
    assert head_block_rows(257, 49152, 4, on_gpu=False) == 129
    assert head_block_rows(100, 49152, 4, on_gpu=False) == 100 <= CPU_BLOCK_ROWS
