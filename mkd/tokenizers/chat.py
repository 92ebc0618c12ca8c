"""Conversations to ids and loss masks through a model's chat template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from mkd.errors import DataError
from mkd.tokenizers.chat_input import ASSISTANT, Conversation
from mkd.tokenizers.spans import EncodedText, byte_offsets, locate, utf8

PROBE = ({"role": "user", "content": "question"}, {"role": ASSISTANT, "content": "answer"})
GENERATION_MARK = re.compile(r"\{%-?\s*generation\b")


@dataclass(frozen=True)
class Turn:
    """The place of an assistant message in the rendered conversation, in bytes."""

    message: int  # number of the message in the conversation
    start: int  # end of the generation prompt
    content_end: int  # end of the content
    end: int  # end of the end-of-turn token; content_end if there is none


@dataclass(frozen=True)
class EncodedChat:
    """A conversation rendered by a chat template and encoded."""

    encoded: EncodedText  # control tokens have spans too: the template wrote them as text
    data: bytes  # the rendered conversation
    turns: tuple[Turn, ...]  # the assistant's turns


def encode_chat(hf: Any, conversation: Conversation) -> tuple[list[int], list[int]]:
    """Return (ids, loss mask) of a conversation in the chat template of the fast transformers tokenizer `hf`.

    The ids are exactly those of `hf.apply_chat_template(messages)`. The mask is 1 on every token that holds a
    character of an assistant turn. A turn reaches from the end of its generation prompt through its
    end-of-turn token. Raises DataError if the template refuses the conversation, or if its assistant turns
    cannot be found.
    """
    _, encoding, turns, hidden = _render_turns(hf, conversation)
    if hidden is None:
        spans = [(start, end) for start, _, end in turns.values()]
        return encoding.ids, _mask_of_spans(encoding.offsets, spans)
    if GENERATION_MARK.search(hf.get_chat_template()):
        marked = hf.apply_chat_template(
            list(conversation.messages),
            return_dict=True,
            return_assistant_tokens_mask=True,
            **_variables(conversation),
        )
        return encoding.ids, marked["assistant_masks"]
    raise DataError(
        f"message {hidden}: the assistant turn cannot be found in the rendered conversation",
        "the chat template rewrites assistant turns, and has no {% generation %} marks around them",
        "add {% generation %} marks to the template, or write the record as prompt and completion",
        code="chat-turn-not-found",
    )


def encode_turns(hf: Any, conversation: Conversation, pieces: Sequence[bytes | None]) -> EncodedChat:
    """Encode the conversation and locate its assistant turns.

    `pieces` are the bytes that each id spells, control tokens included. Raises DataError if the template
    refuses the conversation, or if its assistant turns cannot be found.
    """
    text, encoding, turns, hidden = _render_turns(hf, conversation)
    if hidden is not None:
        raise DataError(
            f"message {hidden}: the assistant turn cannot be found in the rendered conversation",
            "the chat template rewrites assistant turns, so that the tokens of an answer are not known",
            "use a template that keeps them, or write the record as prompt and completion",
            code="chat-turn-not-found",
        )
    data = utf8(text)
    in_text = np.ones(len(encoding.ids), dtype=bool)
    encoded = locate(encoding.ids, in_text, pieces, data, lambda: byte_offsets(text, encoding.offsets))
    pairs = [pair for start, end, last in turns.values() for pair in ((start, end), (end, last))]
    places = byte_offsets(text, pairs).reshape(-1, 4)[:, [0, 1, 3]].tolist()
    named = zip(turns, places, strict=True)
    return EncodedChat(encoded, data, tuple(Turn(message, *place) for message, place in named))


def encode_generation_prompt(hf: Any, conversation: Conversation) -> list[int]:
    """Return the ids of the conversation with the template's generation prompt. Raises DataError."""
    backend = hf.backend_tokenizer
    text = _render(hf, conversation, add_generation_prompt=True)
    backend.encode_special_tokens = False  # control tokens in the template become control tokens
    return backend.encode(text, add_special_tokens=False).ids


def end_of_turn(hf: Any) -> str | None:
    """Return the control token that closes an assistant turn in the chat template of `hf`, or None."""
    probe = Conversation(with_parts(PROBE) if reads_parts_only(hf) else PROBE)
    try:
        text = _render(hf, probe)
    except DataError:
        return None
    span = _turn_span(hf, probe, 1, text)
    return None if span is None else text[span[1] : span[2]].strip() or None


def reads_parts_only(hf: Any) -> bool:
    """Return True if the template drops contents that are texts, as those of vision-language models may."""
    if PROBE[0]["content"] in _rendered_or_empty(hf, PROBE):
        return False
    return PROBE[0]["content"] in _rendered_or_empty(hf, with_parts(PROBE))


def with_parts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with every content as a list of parts."""
    return [{**message, "content": _like_parts(message["content"])} for message in messages]


def _like_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _rendered_or_empty(hf: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    try:
        return _render(hf, Conversation(messages))
    except DataError:
        return ""


def _render_turns(
    hf: Any, conversation: Conversation
) -> tuple[str, Any, dict[int, tuple[int, int, int]], int | None]:
    """Return (rendered text, its encoding, assistant message -> its `_turn_span`, the first hidden turn).

    A hidden turn is counted from 1; None: the template hides no turn.
    """
    text, backend = _render(hf, conversation), hf.backend_tokenizer
    backend.encode_special_tokens = False  # control tokens in the template become control tokens
    encoding = backend.encode(text, add_special_tokens=False)
    numbers = [i for i, message in enumerate(conversation.messages) if message["role"] == ASSISTANT]
    turns = {number: _turn_span(hf, conversation, number, text) for number in numbers}
    hidden = next((number + 1 for number, span in turns.items() if span is None), None)
    return text, encoding, {number: span for number, span in turns.items() if span is not None}, hidden


def _turn_span(hf: Any, conversation: Conversation, turn: int, text: str) -> tuple[int, int, int] | None:
    """Return (start, end of the content, end) of assistant message `turn`, in characters of `text`.

    `text` is the rendered conversation. The end-of-turn token, if there is one, lies between the two ends.
    Return None if the template hides the turn.

    The conversation is rendered again with a placeholder as the content of this one turn. The text after the
    placeholder must be the tail of `text`; this gives the end of the turn. It does so whatever the template
    does to earlier turns (drops their reasoning) or only at the very end (adds EOS). The start is the end of
    the generation prompt, where generation starts. If the template has no prompt, or its prompt is longer
    than what it keeps, the start is the place of the placeholder.
    """
    messages, placeholder = conversation.messages, "assistantturn"
    while placeholder in text:
        placeholder += "0"
    is_text = isinstance(messages[turn]["content"], str)
    content = placeholder if is_text else _like_parts(placeholder)
    replaced = [*messages[:turn], {**messages[turn], "content": content}, *messages[turn + 1 :]]
    changed = replace(conversation, messages=replaced)
    before, found, after = _render(hf, changed).partition(placeholder)
    if not found or placeholder in after or not text.endswith(after):
        return None
    end = len(text) - len(after)
    for prompt in (_generation_prompt(hf, conversation.beginning(turn)), before):
        if prompt is not None and text.startswith(prompt) and len(prompt) <= end:
            return len(prompt), end, end + _end_of_turn_length(hf, after)
    return None


def _end_of_turn_length(hf: Any, after: str) -> int:
    """Count characters from the end of the content through the control token that closes it, if any."""
    blank = len(after) - len(after.lstrip())
    tokens = (token.content for token in hf.added_tokens_decoder.values())
    closing = max((token for token in tokens if after.startswith(token, blank)), key=len, default=None)
    return 0 if closing is None else blank + len(closing)


def _mask_of_spans(offsets: Iterable[tuple[int, int]], spans: Iterable[tuple[int, int]]) -> list[int]:
    """Return 1 for tokens between the first and the last that touch a span (offsets may exclude blanks)."""
    starts, ends = np.asarray(list(offsets), dtype=np.int64).reshape(-1, 2).T
    mask = np.zeros(len(starts), dtype=np.uint8)
    for start, end in spans:
        mask[np.searchsorted(ends, start, side="right") : np.searchsorted(starts, end, side="left")] = 1
    return mask.tolist()


def _generation_prompt(hf: Any, conversation: Conversation) -> str | None:
    """Return the prompt for the next turn; None if the template has no prompt, or refuses one here."""
    if not conversation.messages:
        return None
    try:
        prompt = _render(hf, conversation, add_generation_prompt=True)
        return None if prompt == _render(hf, conversation) else prompt
    except DataError:
        return None


def _variables(conversation: Conversation) -> dict[str, Any]:
    """Return what the template reads apart from the messages."""
    tools = None if conversation.tools is None else list(conversation.tools)
    return {"tools": tools, **conversation.template_kwargs}


def _render(hf: Any, conversation: Conversation, add_generation_prompt: bool = False) -> str:
    options = dict(tokenize=False, add_generation_prompt=add_generation_prompt, **_variables(conversation))
    try:
        return hf.apply_chat_template(list(conversation.messages), **options)
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise DataError(
            f"the chat template refuses the conversation: {error}",
            "it cannot become tokens in the way the model was trained on",
            "check the roles and their order against the template of the model",
            code="chat-template-refuses",
        ) from error
