"""Cross-tokenizer teachers as a kind of run: both models are compared on aligned chunks of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mkd.config.schema import TeacherConfig, XTokenConfig
from mkd.config.tag_rules import taught_tags
from mkd.errors import MkdError, UsageError, collect_error
from mkd.kinds.context.contexts import context_details
from mkd.kinds.kind import Kind, TeacherCard
from mkd.plan.checks.no_effect import no_effect
from mkd.plan.facts import RunFacts

if TYPE_CHECKING:  # they load torch
    from mkd.kinds.cross_tokenizer.cross_tokenizer_setup import CrossTokenizerSetup
    from mkd.resolve.model_source import ModelSource
    from mkd.resolve.preflight import Tokenizers

_READERS = {
    "top_k": ("partition_kl",),
    "relaxed_map": ("gold", "h_kl"),
    "projection": ("partition_kl", "prefix_kl", "p_kl", "gold", "h_kl"),
}
"""Setting -> the losses that read it."""

_SORTED = "over the common tokens and the rest, and the L1 distance of the others, sorted"
_COMPARED = {
    "partition_kl": "over the tokens that both sides can spell, and the rest",
    "prefix_kl": "over the common tokens, another counting as the one it begins with, and the rest",
    "p_kl": "over the teacher's tokens, the student's probabilities projected on them",
    "gold": _SORTED,
    "h_kl": _SORTED,
}
"""Loss of a chunk -> what the divergence compares, for the loss card."""


class CrossTokenizers(Kind):
    """Runs with a teacher that has another tokenizer than the student."""

    def problems(self, facts: RunFacts) -> Iterator[UsageError]:
        config = facts.config
        averages = config.kd.averages_teachers and len(config.teachers) > 1
        for index, teacher in enumerate(config.teachers):
            if teacher.xtoken is None:
                continue
            if config.needs_models:
                yield from _unread(teacher, teacher.xtoken, f"teachers[{index}]")
            if averages:
                what = f"teacher-combination average, but teachers[{index}] has xtoken settings"
                why = "probabilities of different tokens have no mean"
                do = "use --teacher-combination weighted_sum"
                yield UsageError(what, why, do, code="exclude-each-other")

    def file_problems(
        self,
        facts: RunFacts,
        tokenizers: Tokenizers | None,
        student: ModelSource | None,
        teachers: Sequence[ModelSource | None],
    ) -> list[MkdError]:
        from mkd.xtoken.vocabulary.relation_cache import check_projection

        problems: list[MkdError] = []
        for teacher, theirs in zip(
            facts.config.teachers, tokenizers.teachers if tokenizers else (), strict=False
        ):
            path = teacher.xtoken.projection if teacher.xtoken else None
            if path is not None and tokenizers is not None and theirs is not None:
                collect_error(problems, partial(check_projection, Path(path), tokenizers.student, theirs))
        return problems

    def teaches(self, teacher: TeacherConfig) -> bool:
        return teacher.xtoken is not None

    def teacher_card(self, teacher: TeacherConfig) -> TeacherCard:
        assert teacher.xtoken is not None, "the teacher is of this kind"
        loss = teacher.xtoken.loss
        return TeacherCard(
            details=context_details(teacher.context),
            divergence=(
                "sum |sorted p_t - sorted p_s|"
                if loss == "uld"
                else f"{{}} {_COMPARED[loss]}, per aligned chunk of text"
            ),
            vocabulary="rows of another tokenizer, related by their bytes",
            normaliser="KD of aligned chunks by their number",
            without_counterpart="both models must have one tokenizer",
        )

    def teacher_setup(
        self, problems: list[MkdError], facts: RunFacts, index: int, source: ModelSource | None
    ) -> CrossTokenizerSetup:
        from mkd.kinds.cross_tokenizer.cross_tokenizer_setup import CrossTokenizerSetup

        config, name = facts.config, facts.teacher_names[index]
        tags = taught_tags(config, name)
        return CrossTokenizerSetup(config.teachers[index], index, name, source, tags=tags)


def _unread(teacher: TeacherConfig, xtoken: XTokenConfig, path: str) -> Iterator[UsageError]:
    """Yield settings of one teacher that nothing reads."""
    if xtoken.loss == "uld" and teacher.divergence is not None:
        why = "its xtoken loss uld is a distance of sorted probabilities"
        yield no_effect(f"{path}.divergence {teacher.divergence}", why, "choose another xtoken loss")
    for field, losses in _READERS.items():
        value = getattr(xtoken, field)
        if value != getattr(XTokenConfig(), field) and xtoken.loss not in losses:
            why = f"its loss is {xtoken.loss}"
            yield no_effect(f"{path}.xtoken.{field} {value}", why, f"use loss {' or '.join(losses)}")
