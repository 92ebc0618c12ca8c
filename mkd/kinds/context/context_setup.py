"""The set-up of a teacher that reads another prompt than the student."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mkd.config.schema import Config
from mkd.data.aligned.context_records import ContextTemplate
from mkd.data.aligned.teacher_side import TeacherText
from mkd.kinds.context.context_settings import ContextConfig
from mkd.kinds.context.context_term import ContextTeacher
from mkd.parallel.context import ParallelContext
from mkd.resolve.preflight import Tokenizers
from mkd.resolve.teacher_setup import TeacherSetup
from mkd.train.teachers.base import Teacher


@dataclass(frozen=True)
class ContextSetup(TeacherSetup):
    """The teacher's side of the text."""

    own_text: TeacherText | None = None  # known after `meet`

    @property
    def settings_of_context(self) -> ContextConfig:
        assert self.settings.context is not None, "the teacher is of this kind"
        return self.settings.context

    def meet(self, config: Config, tokenizers: Tokenizers, context: ParallelContext) -> ContextSetup:
        assert self.source is not None, "the teacher runs"
        text = TeacherText(
            tokenizer=tokenizers.student,
            vocab_size=self.source.shape.vocab_size,
            seq_length=self.settings_of_context.seq_length,
            name=self.name,
            context=template_of(self.name, self.settings_of_context),
        )
        return replace(self, own_text=text)

    @property
    def text(self) -> TeacherText:
        assert self.own_text is not None, "`meet` comes first"
        return self.own_text

    def term(self, share: float, divergence: Mapping[str, Any]) -> Teacher:
        return ContextTeacher(self.name, share, self.index, divergence)


def template_of(name: str, settings: ContextConfig) -> ContextTemplate:
    """Return the recipe of the prompts of the teacher `name`. The settings have been checked."""
    kwargs = settings.chat_template_kwargs
    return ContextTemplate(
        name=name,
        user=settings.user,
        system=settings.system,
        template_kwargs={} if kwargs is None else json.loads(kwargs),
        may_miss=settings.missing == "skip",
        skip_first=settings.skip_first,
    )
