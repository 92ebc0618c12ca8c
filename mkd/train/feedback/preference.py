"""Direct preference optimisation: raise the chosen answer over the rejected one, relative to a reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from mkd.data.batch import PAIR_NUMBER, PackedBatch
from mkd.train.feedback.coefficients import coefficient_loss, reference_logp, student_logp
from mkd.train.sums import PREFERENCE, TermSums
from mkd.train.teachers.base import LossInput
from mkd.xtoken.segments import sum_by


@dataclass(frozen=True)
class Preference:
    """The loss -ln sigmoid(z) of each pair; z = beta ((s_c - r_c) - (s_r - r_r)).

    s and r are the sums of ln p over the tokens of an answer, under the student and the reference; c is the
    chosen answer, r the rejected one. The derivative by ln p of a chosen token is -beta sigmoid(-z), by that
    of a rejected one the negative. Source: Rafailov et al. 2023 (arXiv 2305.18290), section 4.
    """

    beta: float
    reference: int = 0  # number of the reference among the frozen models of the stage
    factor: float = 1.0
    name: str = PREFERENCE

    measures: ClassVar[tuple[str, ...]] = ("dpo/margin", "dpo/accuracy")
    has_held_out_loss: ClassVar[bool] = True

    def num_rows(self, batch: PackedBatch) -> int:
        """Return the pairs of a micro-batch."""
        return batch.num_pairs

    def loss(self, given: LossInput, scale: Tensor) -> tuple[Tensor, TermSums]:
        pair = self._signed_pairs(given.batch)
        margin = self.beta * self._differences(given, pair)
        steepness = (self.beta * torch.sigmoid(-margin))[pair.abs() - 1]
        loss = coefficient_loss(given, steepness * pair.sign(), scale)
        if given.context.cp_rank > 0:  # every rank of a row knows its pairs, and one of them reports
            return loss, TermSums(measures=dict.fromkeys(self.measures, 0.0))
        values = margin.sum(), (margin > 0).sum()
        measures = dict(zip(self.measures, values, strict=True))
        return loss, TermSums(feedback=F.softplus(-margin).sum(), rows=len(margin), measures=measures)

    def _signed_pairs(self, batch: PackedBatch) -> Tensor:
        """Return the number of the pair of each loss row, from 1, negative in its rejected answer; [n]."""
        if not batch.num_pairs:  # a micro-batch of padding
            return batch.loss_rows
        return batch.row_values[PAIR_NUMBER][0, batch.loss_rows]

    def _differences(self, given: LossInput, pair: Tensor) -> Tensor:
        """Return (s_c - r_c) - (s_r - r_r) of each pair, fp64 [pairs].

        Communication: one all-reduce SUM over context parallelism; no backward.
        """
        logp = student_logp(given) - reference_logp(given, self.reference)
        found = sum_by(pair.abs() - 1, logp.double() * pair.sign(), given.batch.num_pairs)
        if given.cp_group is not None:
            dist.all_reduce(found, group=given.cp_group)
        return found
