"""Sums by index against a loop."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mkd.xtoken.segments import log_sum_exp_by, sum_by, sum_segments


@pytest.mark.parametrize("shape", [(), (3,)], ids=["numbers", "rows"])
@pytest.mark.parametrize("count", [0, 1, 50])
def test_sums_by_index(shape, count):
    generator = torch.Generator().manual_seed(count)
    index = torch.randint(0, 7, (count,), generator=generator)
    values = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    expected = torch.zeros(8, *shape, dtype=torch.float64)
    for i, value in zip(index.tolist(), values, strict=True):
        expected[i] += value
    close = partial(torch.testing.assert_close, rtol=1e-14, atol=1e-14)
    close(sum_by(index, values, 8), expected)
    order = index.argsort(stable=True)
    close(sum_segments(index[order], values[order], 8), expected)


@pytest.mark.parametrize("count", [0, 1, 50])
def test_logarithms_of_sums(count):
    generator = torch.Generator().manual_seed(count)
    index = torch.randint(0, 7, (count,), generator=generator)
    values = 300 * torch.randn(count, generator=generator, dtype=torch.float64)
    expected = torch.stack([values[index == i].logsumexp(dim=0) for i in range(8)])
    torch.testing.assert_close(log_sum_exp_by(index, values, 8), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.gpu
@pytest.mark.parametrize("function", [sum_by, log_sum_exp_by])
def test_the_same_bits_every_time(function):
    index = torch.randint(0, 5, (100_000,), device="cuda")
    values = torch.randn(100_000, device="cuda")
    first = function(index, values, 5)
    torch.cuda.set_sync_debug_mode("error")  # nothing waits for the device
    try:
        others = [function(index, values, 5) for _ in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(other, first) for other in others)
    torch.testing.assert_close(first, function(index.cpu(), values.cpu(), 5).cuda(), rtol=1e-4, atol=1e-2)


@pytest.mark.gpu
def test_rows_on_a_gpu():
    index = torch.randint(0, 500, (1000,), device="cuda").sort().values
    values = torch.randn(1000, 257, device="cuda")
    expected = torch.zeros(501, 257, device="cuda").index_add_(0, index, values)
    torch.testing.assert_close(sum_segments(index, values, 501), expected)
