"""The objective: final hidden states of all models -> distillation loss of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mkd.config.schema import KDConfig
from mkd.data.batch import PackedBatch
from mkd.losses import KDOutput, fused_linear_kd, vocab_parallel_kd
from mkd.models.stage import DistillationStage
from mkd.parallel.context import ParallelContext
from mkd.parallel.pipeline import take_teacher_hidden
from mkd.train.sums import LossSums, TeacherSums, report, report_size
from mkd.train.teachers.stored import topk_loss
from mkd.train.teachers.teacher_loss import TeacherLoss, compare, use_heads
from mkd.train.teachers.weights import pack_weights


@dataclass(frozen=True)
class Objective:
    """Runs all heads and the loss on the last stage; the teachers' states end here.

    One teacher that reads the student's tokens takes one pass over the heads. Otherwise the cross entropy and every teacher
    have a pass of their own, whose gradients add up.

    `inverse_counts` hold 1 / (loss tokens of the global batch), and for each teacher 1 / (rows of the global batch that it is
    compared on), so that gradients of micro-batches and data-parallel ranks only need to be added.
    """

    kd: KDConfig
    context: ParallelContext
    teachers: tuple[TeacherLoss, ...]
    inverse_counts: Tensor  # [1 + teachers] fp32
    with_ce_metric: bool = False  # also report CE where kd_ratio is 1 and the loss does without it
    reports: list[tuple[tuple[int, ...], Tensor]] | None = (
        None  # if a list: sample ids and report of each micro-batch
    )

    @property
    def names(self) -> tuple[str, ...]:
        """Of what is compared with the student: the teachers, or all together."""
        return ("average",) if self.kd.averages_teachers else tuple(one.name for one in self.teachers)

    @property
    def num_sums(self) -> int:
        return report_size(len(self.names))

    @property
    def fp32_logits(self) -> bool:
        """Always in evaluation: bf16 logits add nearly as much error as the rest of a model in bf16 (docs/performance.md)."""
        return self.kd.kd_fp32_logits or not torch.is_grad_enabled()

    def sums(self, vector: Tensor) -> LossSums:
        """Of the added-up reports."""
        return LossSums.of(vector, self.names, self.kd.kd_ratio)

    def __call__(
        self, stage: DistillationStage, batch: PackedBatch, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Megatron's loss callback: (loss to differentiate, 0 tokens: nothing is left to divide by, report fp64)."""
        teacher_hiddens = take_teacher_hidden(hidden)
        takes_one_pass = len(self.names) < 2 and not any(one.is_cross_tokenizer for one in self.teachers)
        one_or_many = self._one_pass if takes_one_pass else self._pass_per_teacher
        loss, sums = one_or_many(stage, batch, hidden, teacher_hiddens)
        if self.reports is not None:
            self.reports.append((batch.sample_ids, sums))
        return loss, torch.zeros((), dtype=torch.int), sums

    def _one_pass(
        self,
        stage: DistillationStage,
        batch: PackedBatch,
        hidden: Tensor,
        teacher_hiddens: tuple[Tensor, ...],
    ):
        if batch.teacher is not None:
            output = topk_loss(
                self.teachers[0],
                self.kd.kd_ratio,
                stage.student,
                batch,
                hidden,
                self.context.tp_group,
                self.with_ce_metric,
            )
        else:
            loss = self._fused if self.kd.kd_fused_head or not torch.is_grad_enabled() else self._on_logits
            output = loss(stage, batch, hidden, teacher_hiddens, self.kd.kd_ratio)
        teachers = [TeacherSums.of(output, output.num_loss_tokens)] * len(self.names)
        sums = report(output.ce, output.num_loss_tokens, teachers, hidden)
        return output.loss * self.inverse_counts[0], sums

    def _pass_per_teacher(
        self,
        stage: DistillationStage,
        batch: PackedBatch,
        hidden: Tensor,
        teacher_hiddens: tuple[Tensor, ...],
    ):
        ratio, total, ce = self.kd.kd_ratio, hidden.new_zeros((), dtype=torch.float32), None
        if ratio < 1 or self.with_ce_metric:
            output = self._fused(stage, batch, hidden, (), 0.0, (1 - ratio) * self.inverse_counts[0])
            total, ce = output.loss * ((1 - ratio) * self.inverse_counts[0]), output.ce
        weights = pack_weights(self.kd, self.context, self.teachers, stage, batch, teacher_hiddens)
        teachers = []
        for index, (teacher, model, teacher_hidden) in enumerate(
            zip(self.teachers, stage.teachers, teacher_hiddens, strict=True)
        ):
            factor = ratio * self.inverse_counts[1 + index]
            own = batch.teachers[index] if batch.teachers else None
            loss, sums = compare(
                teacher,
                self.context,
                stage.student,
                model,
                hidden,
                teacher_hidden,
                batch,
                own,
                weights[index],
                factor,
                self.fp32_logits,
            )
            total = total + loss * factor
            teachers.append(sums)
        return total, report(ce, batch.loss_rows.numel(), teachers, hidden)

    def _fused(
        self,
        stage: DistillationStage,
        batch: PackedBatch,
        hidden: Tensor,
        teacher_hiddens: tuple[Tensor, ...],
        kd_ratio: float,
        loss_gradient: Tensor | None = None,  # None: that of a loss per loss token
    ) -> KDOutput:
        """Heads and loss chunk by chunk; hidden states [t(/tp), 1, h]."""

        def with_weights(student_weight: Tensor, *teacher_weights: Tensor) -> KDOutput:
            return fused_linear_kd(
                hidden.squeeze(1),
                student_weight,
                [teacher_hidden.squeeze(1) for teacher_hidden in teacher_hiddens] or None,
                teacher_weights or None,
                batch.labels[0],
                batch.loss_mask[0],
                loss_rows=batch.loss_rows,
                sequence_parallel=stage.student.config.sequence_parallel,
                loss_gradient=self.inverse_counts[0] if loss_gradient is None else loss_gradient,
                fp32_logits=self.fp32_logits,
                teacher_shares=[teacher.share for teacher in self.teachers],
                **self._settings(stage, kd_ratio),
            )

        return use_heads([stage.student, *(stage.teachers if teacher_hiddens else ())], with_weights)

    def _on_logits(
        self,
        stage: DistillationStage,
        batch: PackedBatch,
        hidden: Tensor,
        teacher_hiddens: tuple[Tensor, ...],
        kd_ratio: float,
    ) -> KDOutput:
        """All logits of the micro-batch at once: the plain form that the fused one is tested against."""
        teacher_logits = None
        if teacher_hiddens:
            with torch.no_grad():
                teacher_logits = stage.teachers[0].logits(teacher_hiddens[0]).squeeze(1)
        return vocab_parallel_kd(
            stage.student.logits(hidden).squeeze(1),
            teacher_logits,
            batch.labels[0],
            batch.loss_mask[0],
            overwrite_student_logits=True,
            **self._settings(stage, kd_ratio),
        )

    def _settings(self, stage: DistillationStage, kd_ratio: float) -> dict[str, Any]:
        divergence = self.teachers[0].divergence if self.teachers else TeacherLoss.of_kd(self.kd).divergence
        return dict(
            tp_group=self.context.tp_group,
            student_vocab_size=stage.student.shape.vocab_size,
            teacher_vocab_size=min(t.shape.vocab_size for t in stage.teachers)
            if kd_ratio > 0 and stage.teachers
            else None,
            kd_ratio=kd_ratio,
            with_ce_metric=self.with_ce_metric,
            **divergence,
        )
