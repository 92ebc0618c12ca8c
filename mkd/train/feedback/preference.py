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
    """The loss -ln sigmoid(margin) of each pair; margin = beta (chosen log-ratio - rejected log-ratio).

    The log-ratio of an answer is the sum of ln p - ln r over its tokens, p under the student and r under the
    reference. The derivative by ln p of a chosen token is -beta sigmoid(-margin), by that of a rejected one
    the negative. Source: Rafailov et al. 2023 (arXiv 2305.18290), section 4.
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
        pair, sign = self._answers(given.batch)
        margin = self.beta * self._log_ratio_difference(given, pair, sign)
        weight = self.beta * torch.sigmoid(-margin)  # -dL/d ln p of a chosen token, [pairs]
        loss = coefficient_loss(given, weight[pair] * sign, scale)
        if given.context.cp_rank > 0:  # every rank of a row knows its pairs, and one of them reports
            return loss, TermSums(measures=dict.fromkeys(self.measures, 0.0))
        values = margin.sum(), (margin > 0).sum()
        measures = dict(zip(self.measures, values, strict=True))
        return loss, TermSums(feedback=F.softplus(-margin).sum(), rows=len(margin), measures=measures)

    def _answers(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return the pair of each loss row, from 0, and 1 in its chosen answer, -1 in the rejected one.

        Both int64 [n].
        """
        if not batch.num_pairs:  # a micro-batch of padding
            return batch.loss_rows, batch.loss_rows
        number = batch.row_values[PAIR_NUMBER][0, batch.loss_rows]
        return number.abs() - 1, number.sign()

    def _log_ratio_difference(self, given: LossInput, pair: Tensor, sign: Tensor) -> Tensor:
        """Return the chosen answer's log-ratio minus the rejected one's, of each pair, fp64 [pairs].

        Communication: one all-reduce SUM over context parallelism; no backward.
        """
        log_ratio = student_logp(given) - reference_logp(given, self.reference)
        difference = sum_by(pair, log_ratio.double() * sign, given.batch.num_pairs)
        if given.cp_group is not None:
            dist.all_reduce(difference, group=given.cp_group)
        return difference
