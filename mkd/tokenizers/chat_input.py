"""Conversations as records give them, and the settings of a run that reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date as Date
from typing import Any

from mkd.errors import DataError, UsageError

ASSISTANT = "assistant"
PROBE = ({"role": "user", "content": "question"}, {"role": ASSISTANT, "content": "answer"})
"""Messages that show what a chat template writes around texts."""
REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of a message's reasoning, first one first
RESERVED = frozenset(  # names that mkd or transformers give a meaning
    ("messages", "conversation", "conversations", "tools", "chat_template", "tokenize")
    + ("add_generation_prompt", "continue_final_message", "return_dict", "return_assistant_tokens_mask")
    + ("padding", "truncation", "max_length", "return_tensors", "tokenizer_kwargs", "strftime_now")
    + ("sanitize_control_tokens",)
)


def reasoning_of(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return (key, text) of the reasoning that transformers 5.23 takes of a message; "" if it has none."""
    key = next((key for key in REASONING if message.get(key) is not None), "")
    text = message.get(key)
    return (key, text) if isinstance(text, str) else ("", "")


@dataclass(frozen=True)
class Conversation:
    """A conversation as a chat template takes it, and which of its messages have loss."""

    messages: Sequence[Mapping[str, Any]]  # without flags of loss
    tools: Sequence[Mapping[str, Any]] | None = None  # JSON schemas of functions
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # of this record
    # For each message: True, False, or None where the record says nothing. Empty: it says nothing at all.
    loss: Sequence[bool | None] = ()

    def followed_by(self, other: Conversation) -> Conversation:
        """Return this conversation with the messages of `other` at its end, and their flags of loss."""
        loss: list[bool | None] = []
        for part in (self, other):
            loss += part.loss or [None] * len(part.messages)
        return replace(self, messages=[*self.messages, *other.messages], loss=loss)

    def beginning(self, count: int) -> Conversation:
        """Return the conversation with only the first `count` messages."""
        return replace(self, messages=self.messages[:count], loss=self.loss[:count])


@dataclass(frozen=True)
class ChatSettings:
    """Settings of a run for its conversations: --chat-loss and --chat-template-kwargs."""

    loss: str = "auto"  # rule for the messages with loss: auto, turns, marks or last
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template
    date: str | None = None  # YYYY-MM-DD, for templates that write the present date; None: the present one

    @classmethod
    def from_flags(cls, loss: str, template_kwargs: str | None, date: str | None) -> ChatSettings:
        """Return the settings of the flags. Raises UsageError for values that are not valid."""
        variables: Any = {}
        if template_kwargs is not None:
            try:
                variables = json.loads(template_kwargs)
            except ValueError as error:
                raise _not_an_object(template_kwargs, str(error)) from None
            if not isinstance(variables, dict):
                raise _not_an_object(template_kwargs, "it is another kind of value")
        names = reserved_names(variables)
        if names:
            raise UsageError(
                f"--chat-template-kwargs sets {names}",
                "mkd passes this to the chat template itself",
                "leave it out",
                code="remove-flag",
            )
        try:
            if date is not None and Date.fromisoformat(date).isoformat() != date:
                raise ValueError
        except ValueError:
            what = f"--chat-date {date} is not a date"
            raise UsageError(what, do="write it as YYYY-MM-DD", code="value-not-valid") from None
        return cls(loss, variables, date)

    def dated(self, known: str | None = None) -> ChatSettings:
        """Return the settings with a date: their own, else the `known` one, else today's."""
        return replace(self, date=self.date or known or Date.today().isoformat())


def reserved_names(variables: Mapping[str, Any]) -> str:
    """Return the names of variables that only mkd may set, joined."""
    return ", ".join(sorted(RESERVED & variables.keys()))


def check_template_kwargs(variables: Any) -> None:
    """Raise DataError unless a record's `chat_template_kwargs` are variables that it may set."""
    if not isinstance(variables, Mapping):
        raise DataError(
            "chat_template_kwargs is not an object",
            "it names variables of the chat template, and their values",
            'write {"enable_thinking": false}, or remove it',
            code="record-value-not-valid",
        )
    names = reserved_names(variables)
    if names:
        raise DataError(
            f"chat_template_kwargs sets {names}",
            "mkd passes this to the chat template itself",
            "remove it from chat_template_kwargs",
            code="record-value-not-valid",
        )


def _not_an_object(text: str, why: str) -> UsageError:
    return UsageError(
        f"--chat-template-kwargs {text[:80]!r} is not a JSON object",
        why,
        """write --chat-template-kwargs '{"enable_thinking": false}'""",
        code="value-not-valid",
    )
