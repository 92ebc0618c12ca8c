"""Conversations to ids and loss masks through a model's own chat template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jinja2.exceptions import TemplateError

from mkd.errors import DataError

ASSISTANT = "assistant"
GENERATION_MARK = re.compile(r"\{%-?\s*generation\b")


def encode_chat(hf, messages: Sequence[Mapping]) -> tuple[list[int], list[int]]:
    """(ids, loss mask) of a conversation under the chat template of the fast transformers tokenizer `hf`.

    The ids are exactly those of `hf.apply_chat_template(messages)`. The mask is 1 on every token that holds a character
    of an assistant turn, from the end of its generation prompt through its end-of-turn token.
    Raises DataError when the template refuses the conversation, or when no method tells its assistant turns apart.
    """
    text = _render(hf, messages)
    backend = hf.backend_tokenizer
    backend.encode_special_tokens = False  # the control tokens of the template are control tokens
    encoding = backend.encode(text, add_special_tokens=False)
    turns = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    spans = [_turn_span(hf, messages, turn, text) for turn in turns]
    if None not in spans:
        return encoding.ids, _mask_of_spans(encoding.offsets, spans)
    if _has_generation_marks(hf):
        marked = hf.apply_chat_template(list(messages), return_dict=True, return_assistant_tokens_mask=True)
        return encoding.ids, marked["assistant_masks"]
    raise DataError(
        f"message {turns[spans.index(None)] + 1}: the assistant turn cannot be found in the rendered conversation",
        "the chat template rewrites assistant turns, and has no {% generation %} marks that would name them",
        "add {% generation %} marks to the template, or write the record as prompt and completion",
    )


def _turn_span(hf, messages: Sequence[Mapping], turn: int, text: str) -> tuple[int, int] | None:
    """Characters [start, end) of `text` that the assistant wrote in message `turn`; None if the template hides them.

    The conversation is rendered again with a placeholder as the content of this one turn. What comes after the
    placeholder must be the tail of `text`, and that gives the end of the turn in place, whatever the template does to
    earlier turns (drops their reasoning) or only at the very end (adds EOS). The start is the end of the generation
    prompt, because that is where generation starts; where a template has none, or prompts with more than it keeps, it
    is what comes before the placeholder.
    """
    placeholder = "assistantturn"
    while placeholder in text:
        placeholder += "0"
    replaced = [*messages[:turn], {**messages[turn], "content": placeholder}, *messages[turn + 1 :]]
    before, found, after = _render(hf, replaced).partition(placeholder)
    if not found or placeholder in after or not text.endswith(after):
        return None
    end = len(text) - len(after)
    for prompt in (_generation_prompt(hf, messages[:turn]), before):
        if prompt is not None and text.startswith(prompt) and len(prompt) <= end:
            return len(prompt), end + _end_of_turn_length(hf, after)
    return None


def _end_of_turn_length(hf, after: str) -> int:
    """Characters from the end of a turn's content through the control token that closes it; 0 if none follows."""
    blank = len(after) - len(after.lstrip())
    tokens = (token.content for token in hf.added_tokens_decoder.values())
    closing = max((token for token in tokens if after.startswith(token, blank)), key=len, default=None)
    return 0 if closing is None else blank + len(closing)


def _mask_of_spans(offsets: Iterable[tuple[int, int]], spans: Iterable[tuple[int, int]]) -> list[int]:
    """1 for the tokens between the first and the last that touch a span. Offsets that leave out blanks do no harm."""
    starts, ends = np.asarray(list(offsets), dtype=np.int64).reshape(-1, 2).T
    mask = np.zeros(len(starts), dtype=np.uint8)
    for start, end in spans:
        mask[np.searchsorted(ends, start, side="right") : np.searchsorted(starts, end, side="left")] = 1
    return mask.tolist()


def _generation_prompt(hf, messages: Sequence[Mapping]) -> str | None:
    """What a model would be given to write the next turn; None where the template has no prompt, or refuses one here."""
    if not messages:
        return None
    try:
        prompt = _render(hf, messages, add_generation_prompt=True)
        return None if prompt == _render(hf, messages) else prompt
    except DataError:
        return None


def _render(hf, messages: Sequence[Mapping], add_generation_prompt: bool = False) -> str:
    try:
        return hf.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt)
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise DataError(
            f"the chat template refuses the conversation: {error}",
            "it cannot become tokens in the way the model was trained on",
            "check the roles and their order against the template of the model",
        ) from error


def _has_generation_marks(hf) -> bool:
    return bool(GENERATION_MARK.search(hf.get_chat_template()))
