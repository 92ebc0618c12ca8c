"""The objective: final hidden states of both models -> distillation loss of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mkd.config.schema import KDConfig
from mkd.data.batch import PackedBatch
from mkd.losses import vocab_parallel_kd
from mkd.models.stage import PairStage
from mkd.parallel.context import ParallelContext
from mkd.parallel.pipeline import take_rider

SUMS = ("loss", "ce", "kd", "teacher_ce", "teacher_entropy", "top1_agreement", "num_loss_tokens")
"""What every micro-batch reports, as sums over its loss tokens: the fields of `KDOutput`; 0 for what was not computed."""


@dataclass(frozen=True)
class Objective:
    """Runs both heads and the loss on the last stage; the teacher's state ends here.

    `inverse_num_tokens` (0-dim fp32) is 1 / (loss tokens of the global batch), so that gradients of micro-batches and
    data-parallel ranks only need to be added.
    """

    kd: KDConfig
    context: ParallelContext
    inverse_num_tokens: Tensor
    with_ce_metric: bool = False  # also report CE where kd_ratio is 1 and the loss does without it

    def __call__(self, stage: PairStage, batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Megatron's loss callback: (loss to differentiate, 0 tokens: nothing is left to divide by, `SUMS` [7] fp64)."""
        teacher_hidden = take_rider(hidden)
        teacher_logits = None
        if teacher_hidden is not None:
            with torch.no_grad():
                teacher_logits = stage.teacher.logits(teacher_hidden).squeeze(1)
        output = vocab_parallel_kd(
            stage.student.logits(hidden).squeeze(1),
            teacher_logits,
            batch.labels[0],
            batch.loss_mask[0],
            tp_group=self.context.tp_group,
            student_vocab_size=stage.student.shape.vocab_size,
            teacher_vocab_size=None if stage.teacher is None else stage.teacher.shape.vocab_size,
            kd_ratio=self.kd.kd_ratio,
            temperature=self.kd.kd_temperature,
            temperature_scaling=self.kd.kd_temperature_scaling,
            divergence=self.kd.kd_divergence,
            with_ce_metric=self.with_ce_metric,
            overwrite_student_logits=True,
        )
        sums = [getattr(output, name) for name in SUMS]
        report = torch.stack([hidden.new_zeros(()).double() if s is None else s.detach().double() for s in sums])
        return output.loss * self.inverse_num_tokens, torch.zeros((), dtype=torch.int), report
