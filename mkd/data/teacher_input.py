"""The part of a batch that belongs to one teacher.

It holds the student's tokens, the tokens of a cross-tokenizer teacher, or stored predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from torch import Tensor

from mkd.parallel.image_row import ImageRow
from mkd.parallel.zigzag import RowShard


class TokenRow(Protocol):
    """A row of packed documents that the layers of a model read."""

    tokens: Tensor  # [1, t] int64
    position_ids: Tensor  # [1, t] int64, from 0 in every document
    cu_seqlens: Tensor  # [documents + 1] int32, without padding
    cu_seqlens_padded: Tensor  # [documents + 1] int32
    max_seqlen: int  # largest span of a document, tokens
    images: ImageRow | None  # None: text alone


@dataclass(frozen=True)
class RowCut:
    """Cut of a row of the student's tokens for one process."""

    shard: RowShard
    cu_seqlens_padded: Tensor  # [documents + 1] int32, of the student's whole row
    # [n] int64, the loss rows of the whole row that the shard has, counted among loss rows
    loss_places: Tensor


class TeacherInput(Protocol):
    """One teacher's part of a micro-batch: a dataclass, whose tensors move to the device with the batch."""

    stays_on_host: ClassVar[bool]  # True: its tensors move later

    def cut(self, cut: RowCut) -> TeacherInput:
        """Return the part in the shard of `cut`."""

    def token_rows(self, student: TokenRow) -> tuple[TokenRow, ...]:
        """Return the row that the teacher's layers read, given the student's; () if none run."""


class PackPart(Protocol):
    """One teacher's part of a pack."""

    def collate(self, others: Sequence[PackPart], student_labels: np.ndarray) -> TeacherInput:
        """Join this part and `others`, those of the following packs, into the part of a micro-batch.

        `student_labels`: labels of the student's packs one after the other, int64 [k * s].
        """


@dataclass(frozen=True)
class SharedTokens:
    """The part of a teacher that reads the student's tokens: nothing is added to a pack or a micro-batch."""

    stays_on_host: ClassVar[bool] = False

    def cut(self, cut: RowCut) -> SharedTokens:
        return self

    def token_rows(self, student: TokenRow) -> tuple[TokenRow, ...]:
        return (student,)

    def collate(self, others: Sequence[SharedTokens], student_labels: np.ndarray) -> SharedTokens:
        return self
