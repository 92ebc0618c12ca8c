"""Rows on the host stay what they were when a data worker moves their tensors into shared memory."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from mkd.parallel.host_row import HostRow


def test_a_row_outlives_the_memory_of_its_tensors():
    names = ("tokens", "cu_seqlens", "cu_seqlens_padded")
    row = SimpleNamespace(
        tokens=torch.arange(4096)[None].clone(),
        cu_seqlens=torch.arange(0, 4097, 64, dtype=torch.int32),
        cu_seqlens_padded=torch.arange(0, 4097, 64, dtype=torch.int32),
        max_seqlen=64,
    )
    expected = {name: getattr(row, name).flatten().numpy().copy() for name in names}
    host = HostRow.of(row)
    for name in names:
        assert not np.shares_memory(getattr(host, name), getattr(row, name).numpy())
        getattr(row, name).share_memory_()  # as when it leaves a worker: the old memory is freed
    others = [np.full(one.shape, -1, one.dtype) for one in expected.values() for _ in range(4)]
    assert all(np.array_equal(getattr(host, name), one) for name, one in expected.items()) and others
