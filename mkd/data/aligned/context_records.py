"""Records whose completion a teacher reads after another prompt than the student.

The completion is the last run of tokens with loss: the last turn of a conversation, or what follows a prompt.
Both models read the same ids there, so every token of it is a chunk. Earlier turns have no prompt of the
teacher's, and are in no chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mkd.config.prompt_template import PROMPT, fill, template_fields
from mkd.config.tag_rules import TaughtTags
from mkd.data.corpus.documents import encode_record
from mkd.data.records.kinds import MESSAGES, PROMPT_COMPLETION, Record
from mkd.data.records.messages import read_messages
from mkd.data.records.refused_keys import CONTEXTS
from mkd.data.records.values import check_string, json_name
from mkd.errors import DataError
from mkd.tokenizers.chat_input import ASSISTANT, Conversation
from mkd.tokenizers.tokenizer import Tokenizer
from mkd.xtoken.align.align_text import AlignedText

TEACHER_MESSAGES, TEACHER_PROMPT, PRIVILEGED = CONTEXTS
SYSTEM, USER = "system", "user"


@dataclass(frozen=True)
class ContextTemplate:
    """The recipe of one teacher's prompt from a record. Picklable, for workers."""

    name: str  # of the teacher, as records with contexts for several teachers name it
    user: str
    system: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    may_miss: bool = False  # a record without a context is not taught, instead of bad
    skip_first: int = 0  # tokens of a completion that are not taught
    fallbacks: tuple[str, ...] = ()  # in place of `user`, where it lacks a value
    tags: TaughtTags | None = None  # of records that need a context; None: all do

    def settings(self, file_tag: str) -> list[Any]:
        """Return what decides the tokens of a corpus, whose records have `file_tag` by default, as JSON."""
        kwargs = sorted(self.template_kwargs.items())
        found: list[Any] = ["context", self.name, self.user, self.system, kwargs]
        found += [self.may_miss, self.skip_first]
        found += [list(self.fallbacks)] if self.fallbacks else []
        return found if self.tags is None else [*found, ["tags", self.tags.own, self.tags.others, file_tag]]

    def teaches(self, tag: str) -> bool:
        """Return True if the teacher teaches records of the tag; "" if tags are not read."""
        return self.tags is None or tag in self.tags

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of records that the prompt may need."""
        return (*CONTEXTS, *(name for name in self.fields if name != PROMPT))

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of its texts, each once."""
        return template_fields("".join((self.user, *self.fallbacks, self.system or "")))

    def prompt_of(self, record: Record) -> Conversation | str | None:
        """Return the teacher's prompt: messages, or a text; None if the record has no context for it.

        Raises DataError for a context that is not valid.
        """
        if record.kind == MESSAGES:
            return self.in_place_of(before_answer(record.values[0]), record.context)
        if record.kind == PROMPT_COMPLETION:
            return self.in_place_of(record.values[0], record.context)
        return None

    def in_place_of(
        self, prompt: Conversation | str, context: Mapping[str, Any]
    ) -> Conversation | str | None:
        """Return the teacher's prompt in place of the student's; None if `context` lacks a value for it.

        `context` has the record's values by key. Raises DataError for one that is not valid.
        """
        given = self._given(context)
        if len(given) > 1:
            raise _bad(f"the record has {' and '.join(given)}", "each says what the teacher reads")
        if isinstance(prompt, str):
            return self._text(prompt, given, context)
        found = self._messages(prompt, given, context)
        if found is not None and self.template_kwargs:
            found = replace(found, template_kwargs={**found.template_kwargs, **self.template_kwargs})
        return found

    def _given(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """Return the contexts that the record itself carries for this teacher, by key."""
        values = {key: context[key] for key in CONTEXTS if key in context}
        mine = {
            key: value.get(self.name) if isinstance(value, Mapping) else value
            for key, value in values.items()
        }
        return {key: value for key, value in mine.items() if value is not None}

    def _messages(
        self, prompt: Conversation, given: Mapping[str, Any], context: Mapping[str, Any]
    ) -> Conversation | None:
        if TEACHER_MESSAGES in given:
            return _own_messages(given[TEACHER_MESSAGES], prompt)
        place = max((n for n, one in enumerate(prompt.messages) if one["role"] == USER), default=None)
        if place is None:
            raise _bad("no user message comes before the answer", "the teacher's context takes its place")
        texts = self._texts(prompt.messages[place].get("content"), given, context)
        if texts is None:
            return None
        user, system = texts
        messages = [dict(one) for one in prompt.messages]
        messages[place]["content"] = user
        if system is not None:
            has_system = messages[0]["role"] == SYSTEM
            messages = [{"role": SYSTEM, "content": system}, *messages[has_system:]]
        return Conversation(messages, prompt.tools, prompt.template_kwargs)

    def _text(self, prompt: str, given: Mapping[str, Any], context: Mapping[str, Any]) -> str | None:
        if TEACHER_MESSAGES in given:
            raise _bad(
                f"the record has {TEACHER_MESSAGES} beside a prompt that is a text",
                "both models read their prompts in the same form",
                "write the prompt and the completion as messages, or give teacher_prompt",
            )
        if self.system is not None:
            raise _bad(
                "a prompt that is a text has no place for the teacher's system message",
                "only the chat template writes one",
                "write the prompt and the completion as messages, or remove context.system",
            )
        texts = self._texts(prompt, given, context)
        return None if texts is None else texts[0]

    def _texts(
        self, question: Any, given: Mapping[str, Any], context: Mapping[str, Any]
    ) -> tuple[str, str | None] | None:
        """Return (last user text, system message) of the teacher's prompt; None if a value is missing."""
        choices = self.user, *self.fallbacks
        if TEACHER_PROMPT in given:
            check_string(given[TEACHER_PROMPT], TEACHER_PROMPT)
            choices = ("{" + TEACHER_PROMPT + "}",)
        elif PRIVILEGED in given and PRIVILEGED not in self.fields:
            what, why = f"the record has {PRIVILEGED}", "no text of this teacher's context has a field for it"
            raise _bad(what, why, f"write {{{PRIVILEGED}}} where it belongs, or remove the key")
        check_string(question, "the last user message")
        others = {key: value for key, value in context.items() if key not in CONTEXTS}
        values = {**others, **given, PROMPT: question}
        filled = next((text for one in choices if (text := self._filled(one, values)) is not None), None)
        if filled is None or self.system is None:
            return None if filled is None else (filled, None)
        system = self._filled(self.system, values)
        return None if system is None else (filled, system)

    def _filled(self, text: str, values: Mapping[str, Any]) -> str | None:
        names = template_fields(text)
        if any(values.get(name) is None for name in names):
            return None
        return fill(text, {name: _as_text(name, values[name]) for name in names})


@dataclass(frozen=True)
class ContextSides:
    """A record's document, and the teacher's prompt."""

    ids: np.ndarray  # [n] int64, of the student
    start: int  # first token of the completion
    stop: int  # behind its last one
    before: np.ndarray | None  # [p] int64, tokens of the teacher's prompt; None: it has none

    @property
    def untaught(self) -> AlignedText:
        """Both sides without anything for the teacher."""
        return AlignedText(self.ids, np.zeros(0, np.int64), np.zeros((0, 4), np.int64))


def context_sides(
    record: Record,
    tokenizer: Tokenizer,
    append_eod: bool,
    template: ContextTemplate,
    teacher: Tokenizer,  # of its prompt
) -> ContextSides:
    """Return both prompts and the completion of a record.

    Raises DataError for a record without a context, unless the template allows that.
    """
    if record.images:
        what, why = "the record has images", "contexts of teachers are text alone so far"
        raise _bad(what, why, "remove the record, or the teacher's context")
    document = encode_record(record, tokenizer, append_eod)
    start, stop = completion_of(document.loss)
    prompt = template.prompt_of(record) if 0 < start < stop else None
    if prompt is None and not template.may_miss:
        raise missing_context(template)
    before = None if prompt is None else np.asarray(prompt_ids(prompt, teacher), np.int64)
    return ContextSides(document.ids, start, stop, before)


def context_record(
    record: Record, tokenizer: Tokenizer, append_eod: bool, template: ContextTemplate
) -> AlignedText:
    """Return both sides of a record; the chunks are the tokens of its completion.

    Without a context, the teacher's side is empty. Raises DataError unless the template allows that.
    """
    one = context_sides(record, tokenizer, append_eod, template, tokenizer)
    if one.before is None:
        return one.untaught
    teacher_ids = np.concatenate([one.before, one.ids[one.start : one.stop].astype(np.int64)])
    chunks = completion_chunks(one.start, len(one.before), one.stop - one.start, template)
    return AlignedText(one.ids, teacher_ids, chunks)


def completion_of(loss: np.ndarray) -> tuple[int, int]:
    """Return [start, stop) of the last run of tokens with loss; (0, 0) if there is none."""
    places = np.flatnonzero(loss)
    if not len(places):
        return 0, 0
    stop = int(places[-1]) + 1
    before = np.flatnonzero(loss[:stop] == 0)
    return (int(before[-1]) + 1 if len(before) else 0), stop


def completion_chunks(start: int, teacher_start: int, count: int, template: ContextTemplate) -> np.ndarray:
    """Return the chunks of a completion of `count` tokens, int64 [c, 4]: each taught token is one."""
    places = np.arange(min(template.skip_first, count), count)
    ours, theirs = start + places, teacher_start + places
    return np.stack([ours, ours + 1, theirs, theirs + 1], axis=1)


def prompt_ids(prompt: Conversation | str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a prompt, which a completion follows."""
    if isinstance(prompt, Conversation):
        return tokenizer.generation_prompt(prompt)
    ids = tokenizer.encode(prompt)
    return ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_id else ids


def before_answer(conversation: Conversation) -> Conversation:
    """Return the conversation before the last assistant message that may have loss."""
    flags = conversation.loss or [None] * len(conversation.messages)
    numbers = [
        number
        for number, (message, flag) in enumerate(zip(conversation.messages, flags, strict=True))
        if message["role"] == ASSISTANT and flag is not False
    ]
    return conversation.beginning(numbers[-1] if numbers else 0)


def _own_messages(given: Any, prompt: Conversation) -> Conversation:
    found, images = read_messages(given, name=TEACHER_MESSAGES, is_table=True)
    if images:
        raise _bad(f"{TEACHER_MESSAGES} has images", "contexts of teachers are text alone so far")
    if found.messages[-1]["role"] == ASSISTANT:
        what, why = f"{TEACHER_MESSAGES} ends with an answer", "the student's answer follows it"
        raise _bad(what, why, "leave out the answer")
    return Conversation(found.messages, prompt.tools, prompt.template_kwargs)


def _as_text(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        what, why = f"{name} is a {json_name(value)}", "it becomes a part of the teacher's prompt"
        raise _bad(what, why, "give a text or a number there")
    return str(value)


def missing_context(template: ContextTemplate) -> DataError:
    """Return the error of a record that has nothing for the teacher of `template`."""
    names = [name for name in template.fields if name != PROMPT]
    return _bad(
        f"the record has no context for the teacher {template.name}",
        f"its prompt has the fields {', '.join(names)}, and a completion follows it"
        if names
        else "it needs a prompt with a completion",
        "add what is missing, or set context: {missing: skip}, so that this teacher leaves such records out",
    )


def _bad(what: str, why: str, do: str = "repair or remove the record") -> DataError:
    return DataError(what, why, do, code="record-value-not-valid")
