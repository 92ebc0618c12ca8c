"""The interface of a teacher: a term of the loss that compares it with the student."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from mkd.config.divergence import DivergenceSettings
from mkd.config.schema import KDConfig, TeacherConfig
from mkd.data.batch import PackedBatch
from mkd.losses import KDObjective, KDOutput, build_divergence
from mkd.losses.lm_head import HeadInput, head_logits, whole_sequence
from mkd.losses.scores import TokenScores
from mkd.losses.softmax import compute_dtype
from mkd.models.language_model import LanguageModel
from mkd.models.stage import DistillationStage, StageOutput
from mkd.models.stored_head import StoredHead
from mkd.parallel.context import ParallelContext
from mkd.train.sums import TermSums

build_objective = cache(KDObjective)  # once per run, not for every micro-batch


@dataclass(frozen=True)
class LossInput:
    """One micro-batch on the last stage, as every term of the loss reads it."""

    stage: DistillationStage  # the models, whose LM heads the terms use
    output: StageOutput  # final hidden states
    batch: PackedBatch
    context: ParallelContext
    fp32_logits: bool
    pack_weights: Mapping[str, Tensor] = field(default_factory=dict)  # teacher -> [k] fp32, by pack
    has_autograd_head: bool = False  # a term's gradient of the head comes from autograd

    def head_gradient(self, scale: Tensor) -> Tensor | None:
        """Return `scale` if a pass over the head may add its gradient to DDP's buffer, else None.

        DDP ignores gradients of autograd for a weight that a pass has served, so that all come from autograd
        if one does.
        """
        return None if self.has_autograd_head else scale

    @property
    def num_packs(self) -> int:
        return len(self.batch.sample_ids)

    @property
    def num_loss_tokens(self) -> Tensor:
        """Loss tokens that this rank holds, int64 []."""
        return self.batch.loss_mask.count_nonzero()


class Term(Protocol):
    """One addend of the loss: `factor` times the mean of a loss over its rows.

    A term whose gradient of the head comes from autograd, as after `loss_row_logits`, says so with a class
    attribute `has_autograd_head = True`.
    """

    @property
    def name(self) -> str:
        """Name in reports."""

    @property
    def factor(self) -> float:
        """Factor in the loss."""

    @property
    def measures(self) -> tuple[str, ...]:
        """Keys of its own metrics, which `TermSums.measures` fills."""

    def num_rows(self, batch: PackedBatch) -> float:
        """Return how many rows a micro-batch's loss sums over, on all context-parallel ranks together.

        Rows with weights count with these.
        """

    def loss(self, given: LossInput, scale: Tensor) -> tuple[Tensor, TermSums]:
        """Return the loss, a sum over rows that carries the graph, and the sums to report.

        `scale` (0-dim) is the number that the caller multiplies the loss by before backward.
        """


class DataTerm(Term, Protocol):
    """A term that takes the place of the cross entropy; see mkd/kinds. Its name is `DATA`."""

    @property
    def loss_key(self) -> str:
        """Metric of its loss."""

    @property
    def reports_cross_entropy(self) -> bool:
        """True if its sums have the student's cross entropy besides its loss, for the metric `ce_loss`."""

    @property
    def has_held_out_loss(self) -> bool:
        """True if it can judge held-out data. Otherwise this has the cross entropy."""


class Teacher(Term, Protocol):
    """A term that compares the student with a teacher."""

    @property
    def share(self) -> float:
        """Fraction of all teachers' weights; the shares add up to 1."""

    @property
    def can_take_cross_entropy(self) -> bool:
        """True if it is a `OnePassTeacher`."""


class OnePassTeacher(Teacher, Protocol):
    """A teacher whose pass over the student's head can also compute the cross entropy."""

    def with_cross_entropy(self, kd_ratio: float, with_ce_metric: bool) -> Teacher:
        """Return the teacher as the only term of the loss: (1 - kd_ratio) * CE + kd_ratio * KD.

        `with_ce_metric`: report the cross entropy even if kd_ratio is 1, where the loss does not need it.
        """


class ScoringTeacher(Teacher, Protocol):
    """A teacher whose layers run, so that its own predictions can decide its weight."""

    def pack_scores(self, given: LossInput) -> PackScores:
        """Return the teacher's own predictions of the text that it is compared on."""


@dataclass(frozen=True)
class PackScores:
    """A teacher's predictions of its tokens, on this context-parallel rank."""

    scores: TokenScores  # of n tokens
    packs: Tensor  # [n] int64, number of the pack that holds each token
    covered: Tensor  # [k] fp32, number of student tokens of the same text in each pack


def head_input(model: LanguageModel | StoredHead, hidden: Tensor) -> HeadInput:
    """Return what losses need to make the logits of a final hidden state, [t(/tp), 1, h]."""
    return HeadInput(hidden.squeeze(1), model.head_weight(), model.shape.logits_cap)


def loss_row_logits(model: LanguageModel, hidden: Tensor, rows: Tensor) -> Tensor:
    """Return logits [n, v/tp] at the positions `rows` [n] of a final hidden state [t(/tp), 1, h].

    They are fp32 under no_grad. Rows without loss skip the head, except in training with sequence
    parallelism, where the head gathers the rows of all ranks.
    """
    if not torch.is_grad_enabled():
        states = whole_sequence(hidden.squeeze(1), model.pg_collection.tp, model.config.sequence_parallel)
        rows_of_head, dtype, cap = model.head_weight(), compute_dtype(hidden), model.shape.logits_cap
        return head_logits(states.index_select(0, rows), rows_of_head, dtype, cap)
    if model.config.sequence_parallel:
        return model.logits(hidden).squeeze(1).index_select(0, rows)
    return model.logits(hidden.index_select(0, rows)).squeeze(1)


def token_sums(output: KDOutput, given: LossInput, weight: Tensor) -> TermSums:
    """Return the sums of a teacher that is compared at every loss token, `weight` in all."""
    return TermSums(
        student_ce=output.ce,
        kd=output.kd,
        ce=output.teacher_ce,
        entropy=output.teacher_entropy,
        top1_agreement=output.top1_agreement,
        weight=weight,
        rows=given.num_loss_tokens,
        tokens=weight,
        compared=weight,
    )


def divergence_settings(kd: KDConfig, teacher: TeacherConfig) -> dict[str, Any]:
    """Return the fields of `KDObjective` that configure the divergence, those of `teacher` first."""
    chosen = DivergenceSettings.from_config(kd, teacher)
    return dict(
        temperature=kd.kd_temperature if teacher.temperature is None else teacher.temperature,
        temperature_scaling=kd.kd_temperature_scaling,
        divergence=build_divergence(chosen.name, chosen.parameter),
    )
