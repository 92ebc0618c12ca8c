"""The objective: final hidden states of both models -> distillation loss of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mkd.config.schema import KDConfig
from mkd.data.batch import PackedBatch
from mkd.losses import KDOutput, fused_linear_kd, vocab_parallel_kd
from mkd.models.stage import PairStage
from mkd.parallel.context import ParallelContext
from mkd.parallel.pipeline import take_rider
from mkd.train.topk_objective import topk_loss

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
        if batch.teacher is not None:
            output = topk_loss(self.kd, stage.student, batch, hidden, self.context.tp_group, self.with_ce_metric)
        else:
            loss = self._fused if self.kd.kd_fused_head else self._on_logits
            output = loss(stage, batch, hidden, teacher_hidden)
        sums = [getattr(output, name) for name in SUMS]
        report = torch.stack([hidden.new_zeros(()).double() if s is None else s.detach().double() for s in sums])
        return output.loss * self.inverse_num_tokens, torch.zeros((), dtype=torch.int), report

    def _fused(self, stage: PairStage, batch: PackedBatch, hidden: Tensor, teacher_hidden: Tensor | None) -> KDOutput:
        """Heads and loss chunk by chunk; hidden states [t(/tp), 1, h]."""

        def with_weights(student_weight: Tensor, teacher_weight: Tensor | None = None) -> KDOutput:
            return fused_linear_kd(
                hidden.squeeze(1),
                student_weight,
                None if teacher_hidden is None else teacher_hidden.squeeze(1),
                teacher_weight,
                batch.labels[0],
                batch.loss_mask[0],
                loss_rows=batch.loss_rows,
                sequence_parallel=stage.student.config.sequence_parallel,
                loss_gradient=self.inverse_num_tokens,
                fp32_logits=self.kd.kd_fp32_logits,
                **self._settings(stage),
            )

        if teacher_hidden is None:
            return stage.student.use_head(with_weights)
        return stage.teacher.use_head(lambda teacher: stage.student.use_head(lambda own: with_weights(own, teacher)))

    def _on_logits(self, stage: PairStage, batch: PackedBatch, hidden: Tensor, teacher_hidden: Tensor | None) -> KDOutput:
        """All logits of the micro-batch at once: the plain form that the fused one is tested against."""
        teacher_logits = None
        if teacher_hidden is not None:
            with torch.no_grad():
                teacher_logits = stage.teacher.logits(teacher_hidden).squeeze(1)
        return vocab_parallel_kd(
            stage.student.logits(hidden).squeeze(1),
            teacher_logits,
            batch.labels[0],
            batch.loss_mask[0],
            overwrite_student_logits=True,
            **self._settings(stage),
        )

    def _settings(self, stage: PairStage) -> dict[str, Any]:
        return dict(
            tp_group=self.context.tp_group,
            student_vocab_size=stage.student.shape.vocab_size,
            teacher_vocab_size=None if stage.teacher is None else stage.teacher.shape.vocab_size,
            kd_ratio=self.kd.kd_ratio,
            temperature=self.kd.kd_temperature,
            temperature_scaling=self.kd.kd_temperature_scaling,
            divergence=self.kd.kd_divergence,
            jsd_beta=self.kd.kd_jsd_beta,
            mixed_kl_weight=self.kd.kd_mixed_kl_weight,
            with_ce_metric=self.with_ce_metric,
        )
