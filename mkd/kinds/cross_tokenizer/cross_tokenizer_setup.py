"""Relate the vocabularies of cross-tokenizer teachers, before data and models are built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from mkd.config.schema import XTokenConfig
from mkd.data.aligned.teacher_side import TeacherText
from mkd.data.images.conversation import ConversationImages
from mkd.data.images.processors import load_image_processor
from mkd.data.teacher_input import SharedTokens
from mkd.operations.run_folders import cache_folder
from mkd.parallel.context import ParallelContext
from mkd.resolve.run_plan import Plan
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
    for index in range(len(plan.teachers)):
        settings = plan.config.teachers[index].xtoken
        if settings is not None:
            found[index] = context.rank_0_first(partial(_cross_tokenizer, plan, tokenizer, index, settings))
    return found


def teacher_texts(
    plan: Plan, cross_tokenizer: Mapping[int, CrossTokenizerTeacher]
) -> list[TeacherText | SharedTokens]:
    """Return the tokens that each teacher of the run reads."""
    sides = [cross_tokenizer.get(index) for index in range(len(plan.teachers))]
    return [side.text if side else SharedTokens() for side in sides]


def teacher_images(plan: Plan, index: int, tokenizer: Tokenizer) -> ConversationImages | None:
    """Return the reader of the teacher's images; None if the teacher or the student reads none."""
    ours = plan.tokenizers.images if plan.tokenizers else None
    if ours is None:
        return None
    folder, max_side = plan.teachers[index].assets, plan.config.data.max_image_side
    processor = load_image_processor(folder, tokenizer, max_side)
    return None if processor is None else ConversationImages(processor, ours.source)


def _cross_tokenizer(
    plan: Plan, tokenizer: Tokenizer, index: int, settings: XTokenConfig
) -> CrossTokenizerTeacher:
    teacher, cache = plan.tokenizers.teachers[index], cache_folder(plan.config)
    relation = build_projection(tokenizer, teacher, cache_dir=cache, projection=settings.projection)
    text = TeacherText(
        tokenizer=teacher,
        vocab_size=plan.teachers[index].shape.vocab_size,
        spellings=relation.spellings,
        alignment=settings.alignment,
        seq_length=settings.seq_length,
        twins=relation.twins(),
        reasoning=settings.reasoning,
        name=plan.teacher_names[index],
        images=teacher_images(plan, index, teacher),
    )
    return CrossTokenizerTeacher(settings, relation, text)
