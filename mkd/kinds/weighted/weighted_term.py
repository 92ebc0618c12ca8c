"""The term of the loss of records with weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mkd.data.batch import RECORD, PackedBatch
from mkd.kinds.weighted.weight_settings import LOSS_KEY
from mkd.train.sums import DATA, TermSums
from mkd.train.teachers.base import LossInput
from mkd.train.teachers.same_tokens import head_pass


@dataclass(frozen=True)
class WeightedCrossEntropy:
    """The sum of w x CE over the loss tokens, where w is the weight of the token's record.

    The loss is divided by the sum of w. Both are fp32 in the pass over the head.
    """

    key: str  # of the weight in records
    factor: float = 1.0
    name: str = DATA

    measures: ClassVar[tuple[str, ...]] = ()
    loss_key: ClassVar[str] = LOSS_KEY
    reports_cross_entropy: ClassVar[bool] = True
    has_held_out_loss: ClassVar[bool] = True

    def num_rows(self, batch: PackedBatch) -> float:
        return batch.row_sums.get(RECORD + self.key, 0.0)  # 0: a micro-batch of padding

    def loss(self, given: LossInput, scale: Tensor) -> tuple[Tensor, TermSums]:
        batch = given.batch
        weights = torch.zeros_like(batch.loss_mask[0])
        weights[batch.loss_rows] = batch.of_loss_rows(RECORD + self.key)
        output = head_pass(given, weights, scale, kd_ratio=0.0)
        rows = weights.sum(dtype=torch.float64)
        return output.loss, TermSums(student_ce=output.plain_ce, feedback=output.ce, rows=rows)
