"""Sums by index against a loop."""

from __future__ import annotations

import pytest
import torch

from mkd.xtoken.segments import sum_by


@pytest.mark.parametrize("shape", [(), (3,)], ids=["numbers", "rows"])
@pytest.mark.parametrize("count", [0, 1, 50])
def test_sums_by_index(shape, count):
    generator = torch.Generator().manual_seed(count)
    index = torch.randint(0, 7, (count,), generator=generator)
    values = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    expected = torch.zeros(8, *shape, dtype=torch.float64)
    for i, value in zip(index.tolist(), values, strict=True):
        expected[i] += value
    torch.testing.assert_close(sum_by(index, values, 8), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.gpu
def test_the_same_bits_every_time():
    index = torch.randint(0, 5, (100_000,), device="cuda")
    values = torch.randn(100_000, device="cuda")
    first = sum_by(index, values, 5)
    assert all(torch.equal(sum_by(index, values, 5), first) for _ in range(20))
