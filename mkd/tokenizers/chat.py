"""Conversations to ids and loss masks through a model's chat template."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mkd.errors import DataError
from mkd.tokenizers.chat_input import ASSISTANT, Conversation
from mkd.tokenizers.chat_template import ChatTemplate
from mkd.tokenizers.chat_turns import Place, TurnSearch
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


def encode_chat(hf: Any, template: ChatTemplate, conversation: Conversation) -> tuple[list[int], list[int]]:
    """Return (ids, loss mask) of a conversation in the chat template of the fast transformers tokenizer `hf`.

    The ids are exactly those of `hf.apply_chat_template`. The mask is 1 on every token that holds a character
    with loss. Marks of the template decide which ones, if the settings allow it and it marks something here.
    Otherwise they are those from the end of a generation prompt through the tokens that close the turn.
    Flags and settings choose among the turns. Raises DataError if the template refuses the conversation or
    drops a part of it that matters, or if its turns cannot be found for certain.
    """
    text = template.render(conversation)
    _check_tools(template, conversation, text)
    trained = trained_messages(conversation, template.settings.loss)
    encoding = _encode(hf, text)
    search = TurnSearch(template, conversation, text)
    if any(message.get("tool_calls") for message in conversation.messages):
        search.require_calls()
    spans = _marked(template, conversation, search, trained)
    if spans is None:
        turns = search.turns()
        spans = [(turns[number].start, turns[number].end) for number in sorted(trained)]
    return encoding.ids, _mask_of_spans(encoding.offsets, spans)


def encode_turns(
    hf: Any, template: ChatTemplate, conversation: Conversation, pieces: Sequence[bytes | None]
) -> EncodedChat:
    """Encode the conversation and locate its assistant turns that have loss. Marks are ignored.

    `pieces` are the bytes that each id spells, control tokens included. Raises DataError if the template
    refuses the conversation or drops a part of it that matters, or if its turns cannot be found for certain.
    """
    text = template.render(conversation)
    _check_tools(template, conversation, text)
    encoding = _encode(hf, text)
    turns = TurnSearch(template, conversation, text).turns()
    data = utf8(text)
    in_text = np.ones(len(encoding.ids), dtype=bool)
    encoded = locate(encoding.ids, in_text, pieces, data, lambda: byte_offsets(text, encoding.offsets))
    named = {
        number: turns[number] for number in sorted(trained_messages(conversation, template.settings.loss))
    }
    pairs = [
        (a, b)
        for one in named.values()
        for a, b in ((one.start, one.content_end), (one.content_end, one.end))
    ]
    places = byte_offsets(text, pairs).reshape(-1, 4)[:, [0, 1, 3]].tolist()
    return EncodedChat(encoded, data, tuple(Turn(n, *place) for n, place in zip(named, places, strict=True)))


def encode_generation_prompt(hf: Any, template: ChatTemplate, conversation: Conversation) -> list[int]:
    """Return the ids of the conversation with the template's generation prompt. Raises DataError."""
    text = template.render(conversation, add_generation_prompt=True)
    _check_tools(template, conversation, text, add_generation_prompt=True)
    ids: list[int] = _encode(hf, text).ids
    return ids


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
    """Return the marked places in the messages with loss; None if marks do not decide."""
    rule = template.settings.loss
    marks = []
    if rule != "turns" and template.has_marks(conversation):
        marks = template.marks(conversation)
    elif rule == "marks":
        raise _without_marks()
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
            raise _mark_not_placed(number)
    if any(len(one) != 1 for one in owners):
        raise _mark_not_placed(search.numbers[0])
    return [mark for mark, (owner,) in zip(marks, owners, strict=True) if owner in trained]


def _encode(hf: Any, text: str) -> Any:
    backend = hf.backend_tokenizer
    backend.encode_special_tokens = False  # control tokens in the template become control tokens
    return backend.encode(text, add_special_tokens=False)


def _mask_of_spans(offsets: Iterable[Place], spans: Iterable[Place]) -> list[int]:
    """Return 1 for tokens between the first and the last that touch a span (offsets may exclude blanks)."""
    starts, ends = np.asarray(list(offsets), dtype=np.int64).reshape(-1, 2).T
    mask = np.zeros(len(starts), dtype=np.uint8)
    for start, end in spans:
        mask[np.searchsorted(ends, start, side="right") : np.searchsorted(starts, end, side="left")] = 1
    found: list[int] = mask.tolist()
    return found


def _check_tools(
    template: ChatTemplate, conversation: Conversation, text: str, add_generation_prompt: bool = False
) -> None:
    """Raise DataError if the template does not write the tools of the record."""
    if not conversation.tools:
        return
    bare = Conversation(conversation.messages, None, conversation.template_kwargs)
    try:
        is_dropped = template.render(bare, add_generation_prompt) == text
    except DataError:
        return  # it takes no calls without tools
    if is_dropped:
        raise DataError(
            "the chat template does not write the record's tools",
            "the model would learn to call functions that it is not told about",
            "use a chat template that writes tools, or write them into the system message",
            code="chat-tools-not-rendered",
        )


def _loss_on_other_role(number: int, role: str) -> DataError:
    return DataError(
        f"message {number + 1} of role {role!r} is flagged to have loss",
        "only the assistant's messages are what the model writes",
        "leave the flag out, or write the text as prompt and completion",
        code="chat-loss-of-other-role",
    )


def _without_marks() -> DataError:
    return DataError(
        "the chat template has no {% generation %} marks",
        "--chat-loss marks takes the loss from them alone",
        "add marks to the template, or use --chat-loss turns",
        code="chat-template-without-marks",
    )


def _mark_not_placed(number: int) -> DataError:
    return DataError(
        f"message {number + 1}: it is not known which {{% generation %}} marks are its own",
        "flags of loss and --chat-loss last choose among the marks by their messages",
        "use --chat-loss turns, or remove the flags",
        code="chat-mark-not-placed",
    )
