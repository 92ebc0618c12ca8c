"""The stored outputs of a teacher for the loss positions of a pack or of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
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

    stays_on_host: ClassVar[bool] = False

    @classmethod
    def empty(cls, k: int, vocab_size: int) -> TeacherRows:
        """Return the rows of a pack without loss."""
        return cls(torch.empty(0, k, dtype=torch.int32), torch.empty(0, k), torch.empty(0, 2), vocab_size)

    def collate(self, others: Sequence[TeacherRows], student_labels: np.ndarray) -> TeacherRows:
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


@dataclass(frozen=True)
class StoredStates:
    """Final hidden states of n loss positions, in ascending order of the positions."""

    states: Tensor  # [n, h] in the dtype of the export; [0, h] unless they are read
    is_read: bool = True  # False: this process does not compute the loss

    # They are as large as a stage's activations: they come to the device for the loss of their micro-batch.
    stays_on_host: ClassVar[bool] = True

    def collate(self, others: Sequence[StoredStates], student_labels: np.ndarray) -> StoredStates:
        """Return these rows and those of `others`, the following packs, one after the other."""
        return replace(self, states=torch.cat([part.states for part in (self, *others)]))

    def cut(self, cut: RowCut) -> StoredStates:
        """Return the rows of the loss positions in the shard of `cut`."""
        return replace(self, states=self.states[cut.loss_places]) if self.is_read else self

    def token_rows(self, student: TokenRow) -> tuple[TokenRow, ...]:
        """Return nothing: a stored teacher has no layers to run."""
        return ()

    def whole(
        self,
        loss_rows: Tensor,  # [n] int64, on the device
        length: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the states of a row of `length` tokens, [length, h]; zeros where it has no loss."""
        states = self.states.to(loss_rows.device, dtype, non_blocking=True)
        whole = states.new_zeros(length, states.shape[1])
        return whole.index_copy_(0, loss_rows, states)
