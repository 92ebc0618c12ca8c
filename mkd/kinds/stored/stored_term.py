"""A stored teacher: only the student's head runs, on the rows that have loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from mkd.data.batch import PackedBatch
from mkd.data.stored.teacher_rows import TeacherRows
from mkd.losses import vocab_parallel_topk_kd
from mkd.train.sums import TermSums
from mkd.train.teachers.base import LossInput, build_objective, loss_row_logits, token_sums


@dataclass(frozen=True)
class Stored:
    """A teacher whose top-k log-probabilities were exported before; it is always the only teacher."""

    name: str
    share: float
    index: int  # number of its entry in a batch
    divergence: Mapping[str, Any]  # the temperature is that of the stored log-probabilities
    factor: float = 1.0
    kd_ratio: float = 1.0  # fraction of the divergence in the loss; the rest is cross entropy
    with_ce_metric: bool = False

    can_take_cross_entropy: ClassVar[bool] = True
    has_autograd_head: ClassVar[bool] = True
    measures: ClassVar[tuple[str, ...]] = ()

    def with_cross_entropy(self, kd_ratio: float, with_ce_metric: bool) -> Stored:
        return replace(self, factor=1.0, kd_ratio=kd_ratio, with_ce_metric=with_ce_metric)

    def num_rows(self, batch: PackedBatch) -> int:
        return batch.num_loss_tokens

    def loss(self, given: LossInput, scale: Tensor) -> tuple[Tensor, TermSums]:
        """See `Term.loss`; autograd multiplies by `scale`. Collectives: those of `vocab_parallel_topk_kd`."""
        student, batch, rows = given.stage.student, given.batch, given.batch.loss_rows
        stored = batch.teacher_inputs[self.index]
        assert isinstance(stored, TeacherRows), "the data have the rows of this teacher"
        objective = build_objective(
            student.shape.vocab_size,
            stored.vocab_size,
            kd_ratio=self.kd_ratio,
            with_ce_metric=self.with_ce_metric,
            **self.divergence,
        )
        output = vocab_parallel_topk_kd(
            loss_row_logits(student, given.output.hidden, rows),
            stored.ids,
            stored.logprobs,
            batch.labels[0, rows],
            batch.loss_mask[0, rows],
            objective,
            tp_group=given.context.tp_group,
            teacher_metrics=stored.metrics,
            overwrite_student_logits=True,
        )
        return output.loss, token_sums(output, given, given.num_loss_tokens)
