"""The stored predictions of a teacher for the loss positions of a pack or of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mkd.data.teacher_input import RowCut, TokenRow
from mkd.parallel.tensor_records import map_tensors


@dataclass(frozen=True)
class TeacherRows:
    """Top-k log-probabilities of n loss positions, in ascending order of the positions."""

    ids: Tensor  # [n, k] int32, distinct in each row, most probable first
    logprobs: Tensor  # [n, k] float32, at the temperature of the export; all other ids share 1 - their mass
    metrics: Tensor  # [n, 2] float32, the teacher's cross entropy and entropy at T = 1, nats
    vocab_size: int  # number of ids that the log-probabilities are normalised over

    @classmethod
    def empty(cls, k: int, vocab_size: int) -> TeacherRows:
        """Return the rows of a pack without loss."""
        return cls(torch.empty(0, k, dtype=torch.int32), torch.empty(0, k), torch.empty(0, 2), vocab_size)

    def collate(self, others: Sequence[TeacherRows], student_labels) -> TeacherRows:
        """Return these rows and those of `others`, the following packs, one after the other."""
        parts = (self, *others)
        tensors = {
            name: torch.cat([getattr(part, name) for part in parts])
            for name in ("ids", "logprobs", "metrics")
        }
        return replace(self, **tensors)

    def cut(self, cut: RowCut) -> TeacherRows:
        """Return the rows of the loss positions in the shard of `cut`."""
        return map_tensors(self, lambda tensor: tensor[cut.loss_places])

    def token_rows(self, student: TokenRow) -> tuple[TokenRow, ...]:
        """Return nothing: a stored teacher has no layers to run."""
        return ()
