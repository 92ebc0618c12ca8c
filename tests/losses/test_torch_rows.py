"""Parts of the passes in plain torch; the passes as a whole are in test_vocab_parallel.py."""

from __future__ import annotations

import pytest
import torch

from mkd.losses.torch_rows import ARGMAX_COLUMNS, clear_rows, first_maximum


@pytest.mark.parametrize("width", [1, ARGMAX_COLUMNS, ARGMAX_COLUMNS + 1, 4 * ARGMAX_COLUMNS, 1000])
@pytest.mark.parametrize("levels", [2, 10**9], ids=["ties", "all different"])
def test_first_maximum(width, levels):
    logits = torch.randint(levels, (50, width + 3), generator=torch.Generator().manual_seed(width)).double()[
        :, :width
    ]
    logits[:5] = 0.0
    logits[0, -1] = 1e9  # in the last block
    first = [(row == row.max()).nonzero()[0].tolist() for row in logits]
    assert first_maximum(logits).tolist() == first


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_cleared_whatever_they_hold(dtype):
    values = torch.tensor(
        [[1.5, -2.0], [float("nan"), -0.0], [float("-inf"), 3.0], [-0.0, float("nan")]], dtype=dtype
    )
    cleared = clear_rows(values.clone(), torch.tensor([False, True, True, False]))
    assert cleared[1:3].view(torch.uint8).eq(0).all()
    assert torch.equal(cleared[[0, 3]].view(torch.uint8), values[[0, 3]].view(torch.uint8))
