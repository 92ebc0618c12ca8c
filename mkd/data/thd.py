"""Documents one after the other in one row: the tensors that attention over packed documents takes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def as_row(values: np.ndarray) -> Tensor:
    """[t] -> [1, t]."""
    return torch.from_numpy(values)[None]


def cumulative(lengths: np.ndarray) -> Tensor:
    """Borders of documents of `lengths` [documents], int32 [documents + 1]."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def position_ids(spans: np.ndarray) -> Tensor:
    """From 0 in every document of `spans` [documents] tokens, int64 [1, t]."""
    return as_row(np.arange(spans.sum()) - np.repeat(np.cumsum(spans) - spans, spans))
