"""The term of the loss that learns from preference pairs, for any `PairLoss`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.data.batch import PAIR_NUMBER, PackedBatch
from mkd.kinds.judged.coefficients import coefficient_loss, reference_logp, student_logp
from mkd.kinds.judged.pair_losses.pair_loss import Answers, PairLoss
from mkd.train.sums import DATA, FEEDBACK_LOSS, TermSums
from mkd.train.teachers.base import LossInput
from mkd.xtoken.segments import sum_by

REFERENCE = 0  # number of the reference among the frozen models of the stage


@dataclass(frozen=True)
class PairTerm:
    """The sum of a pair loss over the pairs of a micro-batch.

    Its coefficient of a token is minus the derivative of the loss by the log-probability of the answer, which
    autograd takes over one number per answer.
    """

    pair_loss: PairLoss
    factor: float = 1.0
    name: str = DATA

    loss_key: ClassVar[str] = FEEDBACK_LOSS
    reports_cross_entropy: ClassVar[bool] = False
    has_held_out_loss: ClassVar[bool] = True

    @property
    def measures(self) -> tuple[str, ...]:
        names = ("margin", "accuracy", *self.pair_loss.part_help)
        return tuple(f"{self.pair_loss.prefix}/{name}" for name in names)

    def num_rows(self, batch: PackedBatch) -> int:
        """Return the pairs of a micro-batch."""
        return batch.num_pairs

    def loss(self, given: LossInput, scale: Tensor) -> tuple[Tensor, TermSums]:
        # int64 [n], negative in the rejected answer
        number = given.batch.of_loss_rows(PAIR_NUMBER).long()
        chosen, rejected = self._answers(given, number)
        with torch.enable_grad():
            margin = self.pair_loss.margin(chosen, rejected)
            value = self.pair_loss.value(margin, chosen, rejected)
            slopes = torch.autograd.grad(value.sum(), (chosen.logp, rejected.logp))
        pair, is_chosen = number.abs() - 1, number > 0
        coefficients = -torch.where(is_chosen, slopes[0][pair], slopes[1][pair])
        loss = coefficient_loss(given, coefficients, scale)
        if given.context.row_shard.rank > 0:  # every rank of a row knows its pairs, and one of them reports
            return loss, TermSums(measures=dict.fromkeys(self.measures, 0.0))
        parts = self.pair_loss.parts(chosen, rejected)
        of_parts = (parts[name].detach().sum() for name in self.pair_loss.part_help)
        values = margin.detach().sum(), (margin > 0).sum(), *of_parts
        measures = dict(zip(self.measures, values, strict=True))
        return loss, TermSums(feedback=value.detach().sum(), rows=len(margin), measures=measures)

    def _answers(self, given: LossInput, number: Tensor) -> tuple[Answers, Answers]:
        """Return the chosen and the rejected answers. Only `logp` has a graph, which begins there.

        Communication: one all-reduce SUM over context parallelism; no backward.
        """
        logp = student_logp(given).double()
        has_reference = self.pair_loss.needs_reference
        reference = reference_logp(given, REFERENCE).double() if has_reference else torch.zeros_like(logp)
        tokens = torch.stack([logp, reference, torch.ones_like(logp)])
        pair, count = number.abs() - 1, given.batch.num_pairs
        sides = [torch.where(side, tokens, 0.0) for side in (number > 0, number < 0)]
        sums = torch.stack([sum_by(pair, one, count) for side in sides for one in side])
        if given.context.row_group is not None:
            dist.all_reduce(sums, group=given.context.row_group)
        chosen, rejected = sums.view(2, 3, count)
        return self._side(chosen), self._side(rejected)

    @staticmethod
    def _side(sums: Tensor) -> Answers:
        return Answers(sums[0].clone().requires_grad_(), sums[1], sums[2])
