"""The set-up of a teacher that reads a row of its own: another prompt than the student, or other tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mkd.config.schema import Config
from mkd.config.tag_rules import TaughtTags
from mkd.data.aligned.context_records import ContextTemplate
from mkd.data.aligned.teacher_pieces import LENGTH_UNIT
from mkd.data.aligned.teacher_side import TeacherText
from mkd.data.prompt_readers import PromptReader
from mkd.data.prompts import PromptSet
from mkd.kinds.context.context_settings import ContextConfig
from mkd.kinds.context.context_term import ContextTeacher
from mkd.parallel.context import ParallelContext
from mkd.resolve.preflight import Tokenizers
from mkd.resolve.teacher_setup import TeacherSetup
from mkd.train.teachers.base import Teacher

SPARE_ROOM = 1.25  # in packs for completions: shorter ones have relatively longer prompts
WITHOUT_PROMPTS = 2.0


@dataclass(frozen=True)
class OwnRowSetup(TeacherSetup):
    """The side of the text of a teacher that reads a row of its own."""

    tags: TaughtTags | None = None  # of records that need a context, if it has one; None: all do
    own_text: TeacherText | None = None  # known after `meet`
    longest_completion: int = 0  # tokens that the student samples at most

    @property
    def template(self) -> ContextTemplate | None:
        """Recipe of the teacher's prompts; None: it reads those of the student."""
        context = self.settings.context
        return None if context is None else template_of(self.name, context, self.tags)

    @property
    def text(self) -> TeacherText:
        assert self.own_text is not None, "`meet` comes first"
        return self.own_text

    def pack_length(self, seq_length: int) -> int:
        return self.text.seq_length or self.text.least_seq_length

    def with_room(self, prompts: PromptSet, seq_length: int, document_multiple: int) -> OwnRowSetup:
        """Return the teacher with packs that have room for completions after its prompts; see `room_for`."""
        reader = PromptReader(self.text.tokenizer, self.template)
        least = room_for(prompts, self.name, reader, self.longest_completion, seq_length, document_multiple)
        return replace(self, own_text=replace(self.text, least_seq_length=least))


@dataclass(frozen=True)
class ContextSetup(OwnRowSetup):
    """The side of the text of a teacher with the student's tokenizer and another prompt."""

    def meet(self, config: Config, tokenizers: Tokenizers, context: ParallelContext) -> ContextSetup:
        assert self.source is not None and self.settings.context is not None, "it runs, with a context"
        text = TeacherText(
            tokenizer=tokenizers.student,
            vocab_size=self.source.shape.vocab_size,
            seq_length=self.settings.context.seq_length,
            name=self.name,
            context=self.template,
        )
        return replace(self, own_text=text, longest_completion=config.rollout.max_new_tokens)

    def prompt_reader(self, tokenizers: Tokenizers) -> PromptReader:
        return PromptReader(tokenizers.student, self.template)

    def term(self, share: float, divergence: Mapping[str, Any]) -> Teacher:
        return ContextTeacher(self.name, share, self.index, divergence)


def room_for(
    prompts: PromptSet,
    name: str,
    reader: PromptReader,  # of the teacher `name`
    new: int,  # tokens of the longest completion
    seq_length: int,  # of the student's packs
    document_multiple: int,
) -> int:
    """Return the tokens of the packs of a teacher that reads completions after prompts of its own.

    That is the student's number, times the proportion of both models' tokens in the longest completions,
    times SPARE_ROOM. Each completion fits. Without prompts it is WITHOUT_PROMPTS times the student's number.
    """
    proportion, longest = WITHOUT_PROMPTS, 0
    if prompts:
        pairs = list(_lengths(prompts, name, reader, new))
        longest = max((theirs for _, theirs in pairs), default=0)
        ours, theirs = (sum(column) for column in zip((1, 1), *pairs, strict=True))
        proportion = max(1.0, SPARE_ROOM * theirs / ours)
    unit, needed = document_multiple * LENGTH_UNIT, max(longest, seq_length * proportion)
    return math.ceil(needed / unit) * unit


def _lengths(prompts: PromptSet, name: str, reader: PromptReader, new: int) -> Iterator[tuple[int, int]]:
    """Yield the tokens of prompts with their longest completions, of the student and of the teacher.

    Each value that a step makes for the teacher's prompt counts as such a completion too.
    """
    for one in prompts.prompts:
        theirs, made = one.of_teachers.get(name), 0
        teaches = reader.context is None or reader.context.teaches(one.tag)
        if reader.made and one.asked is not None and teaches:
            theirs, made = reader.longest(one.asked, one.fields), len(reader.made)
        if theirs is not None:
            yield len(one.ids) + new, len(theirs) + (1 + made) * new


def template_of(name: str, settings: ContextConfig, tags: TaughtTags | None) -> ContextTemplate:
    """Return the recipe of the prompts of the teacher `name` of these `tags`. The settings are checked."""
    kwargs = settings.chat_template_kwargs
    return ContextTemplate(
        name=name,
        user=settings.user,
        system=settings.system,
        template_kwargs={} if kwargs is None else json.loads(kwargs),
        may_miss=settings.missing == "skip",
        skip_first=settings.skip_first,
        fallbacks=settings.fallbacks,
        tags=tags,
    )
