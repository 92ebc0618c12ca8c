from __future__ import annotations

import pytest

from mkd.plan.all_to_all import exchange_ms


def test_exchange_by_hand():
    """8,192 tokens x 8 experts of hidden size 2,048 in bf16 are 256 MiB.

    Over 8 processes 7/8 of it go through NVLink at 350 GB/s. Over 32 processes 24/32 go through the network
    at 45 GB/s, which takes longer than 7/32 through NVLink.
    """
    rows, volume = 8 * 8192, 2**28
    assert exchange_ms(rows, 2048, 2, expert_parallel=1) == 0
    assert exchange_ms(rows, 2048, 2, expert_parallel=8) == pytest.approx(volume * 7 / 8 / 350e6)
    assert exchange_ms(rows, 2048, 2, expert_parallel=32) == pytest.approx(volume * 24 / 32 / 45e6)
