"""Check rows that ranks send each other, and their gradients, which travel back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mkd.parallel.exchange import exchange_rows

WIDTH = 3


def plan_of(size, seed=0):
    """Return rows[i][j]: the rows that rank i sends to rank j.

    One rank sends nothing, one receives nothing, one row goes to all ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = [
        [
            torch.randint(5, (int(torch.randint(4, (1,), generator=generator)),), generator=generator)
            for _ in range(size)
        ]
        for _ in range(size)
    ]
    rows[0] = [torch.tensor([2, 2]) for _ in range(size)]
    if size > 2:
        rows[1] = [torch.tensor([], dtype=torch.int64) for _ in range(size)]
        for sent in rows:
            sent[2] = torch.tensor([], dtype=torch.int64)
    return rows


def hidden_of(rank, dtype):
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64).to(
        dtype
    )


def on_rank(rows, dtype):
    rank, size = dist.get_rank(), dist.get_world_size()
    hidden = hidden_of(rank, dtype).requires_grad_()
    send, receive = [len(r) for r in rows[rank]], [len(rows[i][rank]) for i in range(size)]
    received = exchange_rows(hidden, torch.cat(rows[rank]), send, receive, dist.group.WORLD)
    gradient = torch.arange(1.0, received.numel() + 1, dtype=dtype).view_as(received) * (rank + 1)
    received.backward(gradient)
    return received.detach(), gradient, hidden.grad


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_and_gradients(ranks, size, dtype):
    rows = plan_of(size)
    results = ranks.run(on_rank, size, rows, dtype)
    wanted = [torch.zeros(5, WIDTH, dtype=torch.float64) for _ in range(size)]
    for j, (received, gradient, _) in enumerate(results):
        assert torch.equal(received, torch.cat([hidden_of(i, dtype)[rows[i][j]] for i in range(size)]))
        sources = gradient.double().split([len(rows[i][j]) for i in range(size)])
        for i, part in enumerate(sources):
            wanted[i].index_add_(0, rows[i][j], part)
    for (_, _, got), want in zip(results, wanted, strict=True):
        assert torch.equal(got, want.to(dtype))


def test_counts_must_fit_the_rows(ranks):
    with pytest.raises(AssertionError, match="send_rows lists"):
        ranks.run(with_a_row_too_many, 1)


def with_a_row_too_many():
    exchange_rows(torch.zeros(2, WIDTH), torch.zeros(2, dtype=torch.int64), [1], [1], dist.group.WORLD)
