"""A whole row of packed documents in host memory, for a model on other processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class HostRow:
    """Tokens and borders of a row, before it is cut. Arrays stay on the host when a batch moves."""

    tokens: np.ndarray  # [t] int64
    cu_seqlens: np.ndarray  # [documents + 1] int32, without padding
    cu_seqlens_padded: np.ndarray  # [documents + 1] int32
    max_seqlen: int

    @classmethod
    def of(cls, row: Any) -> HostRow:
        """Return a copy of a `TokenRow` that is on the host.

        A view would read freed memory behind a data worker, which moves a batch's tensors into shared memory.
        """
        tokens, borders, padded = (
            one.numpy().copy() for one in (row.tokens[0], row.cu_seqlens, row.cu_seqlens_padded)
        )
        return cls(tokens, borders, padded, row.max_seqlen)

    @property
    def padded(self) -> Tensor:
        """The borders with padding, as a tensor."""
        return torch.from_numpy(self.cu_seqlens_padded)
