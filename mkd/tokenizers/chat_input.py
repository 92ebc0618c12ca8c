"""Conversations as records give them, and the settings of a run that reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

ASSISTANT = "assistant"


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
    date: str | None = None  # "YYYY-MM-DD" or with a time, for templates that write today's; None: today
