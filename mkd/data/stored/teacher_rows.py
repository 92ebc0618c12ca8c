"""What a stored teacher says about the loss positions of a pack or of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class TeacherRows:
    """Top-k log-probabilities of n loss positions, in ascending order of the positions."""

    ids: Tensor  # [n, k] int32, distinct in each row, most probable first
    logprobs: (
        Tensor  # [n, k] float32, at the temperature of the export; 1 - their mass is that of all other ids
    )
    metrics: Tensor  # [n, 2] float32, the teacher's cross entropy and entropy at T = 1, nats
    vocab_size: int  # the ids that the log-probabilities are normalised over

    @classmethod
    def empty(cls, k: int, vocab_size: int) -> TeacherRows:
        return cls(torch.empty(0, k, dtype=torch.int32), torch.empty(0, k), torch.empty(0, 2), vocab_size)

    @classmethod
    def concatenate(cls, parts: Sequence[TeacherRows]) -> TeacherRows:
        tensors = [
            torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "logprobs", "metrics")
        ]
        return cls(*tensors, parts[0].vocab_size)

    def map(self, change: Callable[[Tensor], Tensor]) -> TeacherRows:
        """The rows with `change` applied to every tensor."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self, **{name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
        )
