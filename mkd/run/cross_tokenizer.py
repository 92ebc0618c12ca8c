"""Teachers that read the same text in tokens of their own: what they need before data and models are built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from mkd.config.schema import Config, XTokenConfig
from mkd.data.aligned.teacher_text import TeacherText
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
    seq_length: int | None = None  # tokens of the teacher's packs, known once the data are


def find_cross_tokenizer(
    plan: Plan, tokenizer: Tokenizer, context: ParallelContext
) -> tuple[CrossTokenizerTeacher | None, ...]:
    """For every teacher that runs; None for one that reads the student's tokens. Collective.

    The relation of both vocabularies is built once and cached beside the tokenised data. Raises UsageError, on every rank, for
    tokenizers that cannot be related.
    """
    found = []
    for index, source in enumerate(plan.teachers):
        settings = plan.config.teachers[index].xtoken
        if settings is None:
            found.append(None)
        else:
            name = plan.teacher_names[index]
            teacher = plan.tokenizers.teachers[index]
            prepare = partial(_cross_tokenizer, plan.config, tokenizer, teacher, source, settings, name)
            found.append(context.rank_0_first(prepare))
    return tuple(found)


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


def with_seq_lengths(
    cross_tokenizer: Sequence[CrossTokenizerTeacher | None], lengths: Sequence[int | None]
) -> tuple[CrossTokenizerTeacher | None, ...]:
    """The same with the pack lengths that the data sets have found."""
    return tuple(
        own and replace(own, seq_length=length) for own, length in zip(cross_tokenizer, lengths, strict=True)
    )
