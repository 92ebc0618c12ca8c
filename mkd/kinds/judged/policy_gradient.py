"""Policy gradient with a clipped ratio: raise the tokens of completions with a reward above the average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mkd.data.batch import ADVANTAGE, SAMPLED_LOGP, PackedBatch
from mkd.kinds.judged.coefficients import coefficient_loss, student_logp
from mkd.train.sums import DATA, FEEDBACK_LOSS, TermSums
from mkd.train.teachers.base import LossInput


@dataclass(frozen=True)
class PolicyGradient:
    """The loss -min(rho A, clip(rho, 1 - e, 1 + e) A) of each sampled token.

    A is the advantage of its completion, rho = p / p_old its probability now over that when it was sampled.
    The derivative by ln p is -A rho, or 0 where the clipped value is the smaller one. If every completion
    serves one update, p_old is p: rho = 1. Source: Shao et al. 2024 (arXiv 2402.03300), section 4.1; a
    divergence from a reference is a term of its own.
    """

    clip_range: float  # e
    has_ratio: bool  # several updates: rho differs from 1
    vocab_size: int | None = None  # ids that can be sampled: p is over them; None: all of the student's
    factor: float = 1.0
    name: str = DATA

    measures: ClassVar[tuple[str, ...]] = ("reward/clipped",)
    loss_key: ClassVar[str] = FEEDBACK_LOSS
    reports_cross_entropy: ClassVar[bool] = False
    has_held_out_loss: ClassVar[bool] = False

    def num_rows(self, batch: PackedBatch) -> int:
        """Return the sampled tokens of a micro-batch; those of advantage 0 count."""
        return batch.num_loss_tokens

    def loss(self, given: LossInput, scale: Tensor) -> tuple[Tensor, TermSums]:
        advantage = given.batch.of_loss_rows(ADVANTAGE)
        ratio = torch.ones_like(advantage)
        if self.has_ratio:
            ratio = (student_logp(given, self.vocab_size) - given.batch.of_loss_rows(SAMPLED_LOGP)).exp()
        gain = ratio * advantage
        bounded = ratio.clamp(1 - self.clip_range, 1 + self.clip_range) * advantage
        is_clipped = bounded < gain
        loss = coefficient_loss(given, gain.masked_fill(is_clipped, 0.0), scale, self.vocab_size)
        value = -torch.minimum(gain, bounded).double().sum()
        measures = {"reward/clipped": is_clipped.sum()}
        return loss, TermSums(feedback=value, rows=given.num_loss_tokens, measures=measures)
