"""The short convolution in front of a recurrence: causal, one filter a channel, inside documents."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_convolution(
    x: Tensor,  # [t, c]
    filters: Tensor,  # [c, k]; the last column multiplies the current token
    positions: Tensor,  # [t] int64, place of each row in its document
) -> Tensor:
    """Return the sum over k tokens of a document, the current one last, [t, c]; no bias."""
    size = filters.size(1)
    total = x * filters[:, -1]
    for back in range(1, min(size, x.size(0))):
        earlier = F.pad(x, (0, 0, back, 0))[: x.size(0)]
        total = total + torch.where((positions >= back)[:, None], earlier, 0.0) * filters[:, size - 1 - back]
    return total
