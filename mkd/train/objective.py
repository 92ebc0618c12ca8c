"""The objective: final hidden states of all models -> loss of one micro-batch, a sum of terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mkd.config.schema import KDConfig
from mkd.data.batch import PackedBatch
from mkd.models.stage import DistillationStage, StageOutput
from mkd.parallel.context import ParallelContext
from mkd.train.sums import DATA, LossSums, ReportLayout, is_of_teacher
from mkd.train.teachers.base import DataTerm, LossInput, Teacher, Term
from mkd.train.teachers.routed_terms import Routed, RunTags, routed_terms
from mkd.train.teachers.same_tokens import CrossEntropy, SameTokens
from mkd.train.teachers.weights import pack_weights


def loss_terms(
    kd: KDConfig,
    teachers: Sequence[Teacher],
    with_ce_metric: bool = False,
    data_term: DataTerm | None = None,
    tags: RunTags | None = None,  # None: all records have all teachers
) -> tuple[Term, ...]:
    """Return the terms of the loss: every teacher's, and the cross entropy or `data_term` in its place.

    Each term runs its own pass over the heads, so that no term waits for another. If there is a single
    teacher, it computes the cross entropy in its pass, if it can. `with_ce_metric` measures the cross entropy
    even if kd_ratio is 1, where the loss does not need it.
    """
    if tags is not None and teachers:
        routed = routed_terms(kd, tags, teachers, with_ce_metric, data_term is not None)
        return routed if data_term is None else (*loss_terms(kd, (), False, data_term), *routed)
    if kd.teacher_combination == "average" and teachers:
        teachers = (SameTokens.from_average(teachers),)
    if data_term is not None:
        of_teachers = (replace(one, factor=kd.kd_ratio) for one in teachers if kd.kd_ratio)
        return (replace(data_term, factor=1 - kd.kd_ratio), *of_teachers)
    if len(teachers) == 1 and teachers[0].can_take_cross_entropy:
        return (teachers[0].with_cross_entropy(kd.kd_ratio, with_ce_metric),)
    terms = tuple(replace(one, factor=kd.kd_ratio) for one in teachers)
    if kd.kd_ratio < 1 or with_ce_metric:
        return (CrossEntropy(factor=1 - kd.kd_ratio), *terms)
    return terms


@dataclass(frozen=True)
class Objective:
    """Runs the LM heads and the loss on the last stage.

    `inverse_counts` holds for each term 1 / (its rows in the global batch). Gradients of micro-batches and
    data-parallel ranks then only need to be added.
    """

    kd: KDConfig
    context: ParallelContext
    terms: tuple[Term, ...]
    inverse_counts: Tensor  # [terms] fp32
    observe: Callable[[LossInput], None] | None = None  # called for every micro-batch, after its loss
    reports: list[tuple[tuple[int, ...], Tensor]] = field(default_factory=list)
    """Sample ids and report of every micro-batch so far."""

    @property
    def layout(self) -> ReportLayout:
        measures = {term.name: term.measures for term in self.terms}
        data: Any = next((term for term in self.terms if term.name == DATA), None)
        if data is None:
            return ReportLayout(tuple(measures), measures)
        return ReportLayout(tuple(measures), measures, data.loss_key, data.reports_cross_entropy)

    @property
    def num_sums(self) -> int:
        return self.layout.size

    def sums(self, vector: Tensor) -> LossSums:
        """Return the sums of added-up reports [num_sums]. Waits for the device."""
        return self.layout.from_vector(vector, self.kd.kd_ratio)

    def __call__(
        self, stage: DistillationStage, batch: PackedBatch, output: StageOutput
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss, 0 (already divided: no division by tokens), and report fp64 [num_sums]."""
        given = self._loss_input(stage, batch, output)
        addends, sums = [], {}
        for term, inverse_count in zip(self.terms, self.inverse_counts, strict=True):
            scale = term.factor * inverse_count
            loss, sums[term.name] = term.loss(given, scale)
            addends.append(loss * scale)
        report = self.layout.to_vector(given.num_loss_tokens, sums)
        self.reports.append((batch.sample_ids, report))
        if self.observe is not None:
            self.observe(given)
        return sum(addends), torch.zeros((), dtype=torch.int), report

    def _loss_input(self, stage: DistillationStage, batch: PackedBatch, output: StageOutput) -> LossInput:
        """Return the input of every term.

        In evaluation logits are always fp32: bf16 logits add nearly as much error as the rest of a model in
        bf16 (docs/performance.md).
        """
        fp32_logits = self.kd.kd_fp32_logits or not torch.is_grad_enabled()
        has_autograd_head = any(getattr(term, "has_autograd_head", False) for term in self.terms)
        given = LossInput(
            stage, output, batch, self.context, fp32_logits, has_autograd_head=has_autograd_head
        )
        if any(isinstance(term, Routed) for term in self.terms):  # each has the weights of its tag
            return given
        teachers = [term for term in self.terms if is_of_teacher(term.name)]
        return replace(given, pack_weights=pack_weights(self.kd, teachers, given))
