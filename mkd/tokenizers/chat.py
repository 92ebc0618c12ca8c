"""Conversations to ids and loss masks through a model's chat template."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mkd.errors import DataError
from mkd.tokenizers.chat_input import ASSISTANT, Conversation
from mkd.tokenizers.chat_shapes import KnownShapes
from mkd.tokenizers.chat_template import ChatTemplate
from mkd.tokenizers.chat_turns import Place, TurnSearch, closing_token, require_tools
from mkd.tokenizers.spans import EncodedText, byte_offsets, locate, utf8


@dataclass(frozen=True)
class Turn:
    """The place of an assistant message in the rendered conversation, in bytes."""

    message: int  # number of the message in the conversation
    start: int  # end of the generation prompt
    content_end: int  # end of the content
    end: int  # end of the tokens that close the turn; content_end if there are none


@dataclass(frozen=True)
class EncodedChat:
    """A conversation rendered by a chat template and encoded."""

    encoded: EncodedText  # control tokens have spans too: the template wrote them as text
    data: bytes  # the rendered conversation
    turns: tuple[Turn, ...]  # the assistant's turns
    origin: str  # of the chat template, for errors


class ChatEncoder:
    """Encodes conversations for one tokenizer."""

    def __init__(self, hf: Any, template: ChatTemplate):
        self._hf, self.template = hf, template

    @cached_property
    def closing(self) -> str | None:
        """Control token that ends an assistant's turn; None if the template writes none."""
        return closing_token(self.template)

    @cached_property
    def _shapes(self) -> KnownShapes:
        return KnownShapes(self.template, self.closing)

    def encode(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        """Return (ids, loss mask) of a conversation.

        The ids are exactly those of transformers' `apply_chat_template`. The mask is 1 on every token that
        holds a character with loss. Marks of the template decide which ones, if the settings allow it and it
        marks something here. Otherwise they are those from the end of a generation prompt through the tokens
        that close the turn. Flags and settings choose among the turns. Raises DataError if the template
        refuses the conversation or drops its tools or calls, or if its turns are not known for certain.
        """
        text = self.template.render(conversation)
        trained = trained_messages(conversation, self.template.settings.loss)
        encoding = self._encoded(text)
        search = TurnSearch(self.template, conversation, text, self.closing)
        turns = self._shapes.turns(conversation, text)
        if turns is None:
            require_tools(self.template, conversation, text)
            search.require_calls()
        spans = _marked(self.template, conversation, search, trained)
        if spans is None:
            turns = turns or search.turns(uses_marks=self.template.settings.loss != "turns")
            spans = [(turns[number].start, turns[number].end) for number in sorted(trained)]
        return encoding.ids, mask_of_spans(encoding.offsets, spans)

    def encode_turns(self, conversation: Conversation, pieces: Sequence[bytes | None]) -> EncodedChat:
        """Encode the conversation and locate its assistant turns that have loss. Marks are ignored.

        `pieces` are the bytes that each id spells, control tokens included. Raises DataError as `encode`.
        """
        text = self.template.render(conversation)
        encoding = self._encoded(text)
        turns = self._shapes.turns(conversation, text)
        if turns is None:
            require_tools(self.template, conversation, text)
            turns = TurnSearch(self.template, conversation, text, self.closing).turns()
        data = utf8(text)
        in_text = np.ones(len(encoding.ids), dtype=bool)
        encoded = locate(encoding.ids, in_text, pieces, data, lambda: byte_offsets(text, encoding.offsets))
        trained = sorted(trained_messages(conversation, self.template.settings.loss))
        pairs = [
            pair
            for one in map(turns.__getitem__, trained)
            for pair in ((one.start, one.content_end), (one.content_end, one.end))
        ]
        places = byte_offsets(text, pairs).reshape(-1, 4)[:, [0, 1, 3]].tolist()
        named = zip(trained, places, strict=True)
        found = tuple(Turn(number, *place) for number, place in named)
        return EncodedChat(encoded, data, found, self.template.origin)

    def generation_prompt(self, conversation: Conversation) -> list[int]:
        """Return the ids of the conversation with the template's generation prompt. Raises DataError."""
        text = self.template.render(conversation, add_generation_prompt=True)
        require_tools(self.template, conversation, text, add_generation_prompt=True)
        ids: list[int] = self._encoded(text).ids
        return ids

    def _encoded(self, text: str) -> Any:
        backend = self._hf.backend_tokenizer
        backend.encode_special_tokens = False  # control tokens in the template become control tokens
        return backend.encode(text, add_special_tokens=False)


def trained_messages(conversation: Conversation, rule: str) -> set[int]:
    """Return the numbers of the messages with loss under the rule of --chat-loss and the record's flags.

    Raises DataError for a flag of loss on a message that is not the assistant's.
    """
    messages = conversation.messages
    flags = conversation.loss or [None] * len(messages)
    first = 0
    if rule == "last":
        first = max((n for n, one in enumerate(messages) if one["role"] == "user"), default=-1) + 1
    found = set()
    for number, (message, flag) in enumerate(zip(messages, flags, strict=True)):
        if message["role"] != ASSISTANT:
            if flag:
                raise _loss_on_other_role(number, message["role"])
        elif flag or (flag is None and number >= first):
            found.add(number)
    return found


def _marked(
    template: ChatTemplate, conversation: Conversation, search: TurnSearch, trained: set[int]
) -> list[Place] | None:
    """Return the marked places in the messages with loss; None if marks do not decide.

    Raises DataError under the rule `marks` if the template for the conversation has none.
    """
    rule = template.settings.loss
    has_marks = template.has_marks(conversation)
    if rule == "marks" and not has_marks:
        raise _no_marks(template, conversation)
    marks = template.marks(conversation) if has_marks and rule != "turns" else []
    if not marks and rule != "marks":
        return None
    if trained == set(search.numbers):
        return marks
    of_message = {}
    for number, texts in search.own_texts.items():
        places = [one.place for one in texts if one.place is not None]
        of_message[number] = {
            n for n, (a, b) in enumerate(marks) for start, end in places if a <= end and start <= b
        }
    owners = [[number for number, owned in of_message.items() if n in owned] for n in range(len(marks))]
    for number, owned in of_message.items():
        if not owned and number in trained:
            raise _mark_not_placed(template, number)
    if any(len(one) != 1 for one in owners):
        raise _mark_not_placed(template, search.numbers[0])
    return [mark for mark, (owner,) in zip(marks, owners, strict=True) if owner in trained]


def mask_of_spans(offsets: Iterable[Place], spans: Iterable[Place]) -> list[int]:
    """Return 1 for tokens between the first and the last that touch a span (offsets may exclude blanks)."""
    starts, ends = np.asarray(list(offsets), dtype=np.int64).reshape(-1, 2).T
    mask = np.zeros(len(starts), dtype=np.uint8)
    for start, end in spans:
        mask[np.searchsorted(ends, start, side="right") : np.searchsorted(starts, end, side="left")] = 1
    found: list[int] = mask.tolist()
    return found


def _loss_on_other_role(number: int, role: str) -> DataError:
    return DataError(
        f"message {number + 1} of role {role!r} is flagged to have loss",
        "only the assistant's messages are what the model writes",
        "leave the flag out, or write the text as prompt and completion",
        code="record-loss-flag-not-valid",
    )


def _no_marks(template: ChatTemplate, conversation: Conversation) -> DataError:
    kind = "without tools" if conversation.tools is None else "with tools"
    return DataError(
        f"--chat-loss marks: the chat template{template.origin} for records {kind} has no "
        "{% generation %} marks",
        "no token of the record would have loss",
        "add marks to this template, or use --chat-loss turns",
        code="chat-marks-not-usable",
    )


def _mark_not_placed(template: ChatTemplate, number: int) -> DataError:
    return DataError(
        f"message {number + 1}: its marks cannot be told from others of the chat template{template.origin}",
        "flags of loss and --chat-loss last choose among the marks by their messages",
        "use --chat-loss turns, or remove the flags",
        code="chat-marks-not-usable",
    )
