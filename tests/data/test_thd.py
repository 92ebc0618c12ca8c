"""Rows of documents."""

from __future__ import annotations

import numpy as np
import torch

from mkd.data.thd import as_row, cumulative, position_ids


def test_rows_of_documents():
    spans = np.array([3, 0, 2])
    assert position_ids(spans).tolist() == [[0, 1, 2, 0, 1]] and position_ids(spans).dtype == torch.int64
    assert cumulative(spans).tolist() == [0, 3, 3, 5] and cumulative(spans).dtype == torch.int32
    assert as_row(spans).shape == (1, 3)
