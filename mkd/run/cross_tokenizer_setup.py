"""Relate the vocabularies of cross-tokenizer teachers, before data and models are built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from mkd.config.schema import Config, XTokenConfig
from mkd.data.aligned.teacher_side import TeacherText
from mkd.data.teacher_input import SharedTokens
from mkd.operations.run_folders import cache_folder
from mkd.parallel.context import ParallelContext
from mkd.run.model_source import ModelSource
from mkd.run.run_plan import Plan
from mkd.tokenizers.tokenizer import Tokenizer
from mkd.xtoken import build_projection
from mkd.xtoken.vocabulary.relation import VocabularyRelation


@dataclass(frozen=True)
class CrossTokenizerTeacher:
    """One teacher's side of the text and of the vocabulary."""

    settings: XTokenConfig
    relation: VocabularyRelation
    text: TeacherText


NO_CROSS_TOKENIZER: Mapping[int, CrossTokenizerTeacher] = MappingProxyType({})
"""Result of `find_cross_tokenizer` if all teachers read the student's tokens."""


def find_cross_tokenizer(
    plan: Plan, tokenizer: Tokenizer, context: ParallelContext
) -> dict[int, CrossTokenizerTeacher]:
    """Return teacher number -> its side, for the teachers with another tokenizer than the student.

    Collective. The relation of both vocabularies is built once and cached beside the tokenised data. Raises
    UsageError on every rank for tokenizers that cannot be related.
    """
    found = {}
    for index, source in enumerate(plan.teachers):
        settings = plan.config.teachers[index].xtoken
        if settings is not None:
            name, teacher = plan.teacher_names[index], plan.tokenizers.teachers[index]
            prepare = partial(_cross_tokenizer, plan.config, tokenizer, teacher, source, settings, name)
            found[index] = context.rank_0_first(prepare)
    return found


def teacher_texts(
    plan: Plan, cross_tokenizer: Mapping[int, CrossTokenizerTeacher]
) -> list[TeacherText | SharedTokens]:
    """Return the tokens that each teacher of the run reads."""
    sides = [cross_tokenizer.get(index) for index in range(len(plan.teachers))]
    return [side.text if side else SharedTokens() for side in sides]


def _cross_tokenizer(
    config: Config,
    tokenizer: Tokenizer,
    teacher: Tokenizer,
    source: ModelSource,
    settings: XTokenConfig,
    name: str,
) -> CrossTokenizerTeacher:
    relation = build_projection(
        tokenizer, teacher, cache_dir=cache_folder(config), projection=settings.projection
    )
    text = TeacherText(
        tokenizer=teacher,
        vocab_size=source.shape.vocab_size,
        spellings=relation.spellings,
        alignment=settings.alignment,
        seq_length=settings.seq_length,
        twins=relation.twins(),
        exact_only=settings.exact_token_match_only,
        reasoning=settings.reasoning,
        name=name,
    )
    return CrossTokenizerTeacher(settings, relation, text)
