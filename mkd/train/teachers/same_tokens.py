"""The losses over the student's own tokens: cross entropy, and teachers with the student's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mkd.data.batch import PackedBatch
from mkd.losses import KDOutput, fused_linear_kd
from mkd.losses.scores import token_scores
from mkd.train.sums import CROSS_ENTROPY, TermSums
from mkd.train.teachers.base import LossInput, PackScores, build_objective, head_input, token_sums
from mkd.xtoken.segments import sum_by


@dataclass(frozen=True)
class CrossEntropy:
    """The student's cross entropy with the data, in its own pass over the head."""

    factor: float
    name: str = CROSS_ENTROPY

    measures: ClassVar[tuple[str, ...]] = ()

    def num_rows(self, batch: PackedBatch) -> int:
        return batch.num_loss_tokens

    def loss(self, given: LossInput, scale: Tensor) -> tuple[Tensor, TermSums]:
        output = head_pass(given, given.batch.loss_mask[0], scale, kd_ratio=0.0)
        return output.loss, TermSums(student_ce=output.ce)


@dataclass(frozen=True)
class SameTokens:
    """A teacher that reads the student's tokens, or the average of several: compared token by token."""

    name: str
    share: float
    indices: tuple[int, ...]  # numbers of its models in the stage
    divergence: Mapping[str, Any]  # see `divergence_settings`
    model_shares: tuple[float, ...] = (1.0,)  # weights of the models in the average; they add up to 1
    factor: float = 1.0
    kd_ratio: float = 1.0  # fraction of the divergence in the loss; the rest is cross entropy
    with_ce_metric: bool = False

    can_take_cross_entropy: ClassVar[bool] = True
    measures: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_average(cls, teachers: Sequence[SameTokens]) -> SameTokens:
        """Return the weighted mean of the teachers' probabilities as one, compared as the first is."""
        indices = tuple(index for one in teachers for index in one.indices)
        shares = tuple(one.share for one in teachers)
        return cls("average", 1.0, indices, teachers[0].divergence, shares)

    def with_cross_entropy(self, kd_ratio: float, with_ce_metric: bool) -> SameTokens:
        return replace(self, factor=1.0, kd_ratio=kd_ratio, with_ce_metric=with_ce_metric)

    def num_rows(self, batch: PackedBatch) -> int:
        return batch.num_loss_tokens

    def loss(self, given: LossInput, scale: Tensor) -> tuple[Tensor, TermSums]:
        mask, weights = given.batch.loss_mask[0], given.pack_weights[self.name]
        row_weights = mask * weights.repeat_interleave(len(mask) // given.num_packs)
        output = head_pass(
            given,
            row_weights,
            scale,
            self.indices,
            self.model_shares,
            kd_ratio=self.kd_ratio,
            with_ce_metric=self.with_ce_metric,
            **self.divergence,
        )
        return output.loss, token_sums(output, given, row_weights.sum())

    def pack_scores(self, given: LossInput) -> PackScores:
        (index,) = self.indices
        model, rows = given.stage.compared[index], given.batch.loss_rows
        packs = rows // (given.batch.tokens.shape[1] // given.num_packs)
        scores = token_scores(
            given.output.teacher_hiddens[index].squeeze(1),
            model.head_weight(),
            rows,
            given.batch.labels[0, rows],
            tp_group=given.context.tp_group,
            logits_cap=model.shape.logits_cap,
            vocab_size=model.shape.vocab_size,
            sequence_parallel=given.stage.student.config.sequence_parallel,
        )
        covered = sum_by(packs, torch.ones(len(rows), device=rows.device), given.num_packs)
        return PackScores(scores, packs, covered)


def head_pass(
    given: LossInput,
    row_weights: Tensor,  # [t] fp32, 0 where a row has no loss
    scale: Tensor,  # 0-dim, see `Term.loss`
    models: Sequence[int] = (),  # numbers of the teachers in the stage
    model_shares: Sequence[float] = (1.0,),
    vocab_size: int | None = None,  # ids of the student that count; None: all
    compact: tuple[Tensor, Tensor] | None = None,
    **settings: Any,  # fields of `KDObjective`
) -> KDOutput:
    """Return (1 - kd_ratio) * CE + kd_ratio * KD over the loss rows, from one pass over the head.

    `compact`: the rows that are compared instead, int64 [n], and the states [n, h] of the only teacher there.
    """
    student, batch, output = given.stage.student, given.batch, given.output
    teachers = [given.stage.compared[index] for index in models]
    states = [output.teacher_hiddens[index] for index in models]
    inputs = [head_input(one, state) for one, state in zip(teachers, states, strict=True)]
    rows = batch.loss_rows
    if compact is not None:
        rows, of_rows = compact
        inputs = [inputs[0]._replace(hidden=of_rows, is_compact=True)]
    objective = build_objective(
        vocab_size or student.shape.vocab_size,
        min((one.shape.vocab_size for one in teachers), default=None),
        **settings,
    )
    return fused_linear_kd(
        head_input(student, output.hidden),
        inputs,
        batch.labels[0],
        row_weights,
        objective,
        loss_rows=rows,
        tp_group=given.context.tp_group,
        sequence_parallel=student.config.sequence_parallel,
        loss_gradient=given.head_gradient(scale),
        fp32_logits=given.fp32_logits,
        teacher_shares=model_shares,
    )
