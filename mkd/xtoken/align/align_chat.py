"""Alignment of conversations, each model in its own chat template, and of prompts with completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mkd.errors import DataError
from mkd.tokenizers.chat import EncodedChat, Turn
from mkd.tokenizers.chat_input import Conversation, reasoning_of
from mkd.tokenizers.load import open_tokenizer
from mkd.tokenizers.spans import EncodedText
from mkd.xtoken.align.align_text import AlignedText, TokenizerSource, aligner

THINK, END_OF_THINK = "<think>", "</think>"


def align_chat(
    student: TokenizerSource,
    teacher: TokenizerSource,
    conversation: Conversation | Sequence[Mapping],  # or the messages of one
    *,
    reasoning: bool = True,
    mode: str = "byte_offset",
) -> AlignedText:
    """Render the conversation in each model's own template and align the assistant messages.

    If both templates close an assistant turn with a control token, this pair is a separate chunk, so that the
    student learns to stop. An answer of blanks only gives no other chunk. Reasoning (`<think>` ...
    `</think>`, or a key of its own) is aligned if both templates keep it, unless `reasoning` is False.

    Raises DataError for a conversation that a template refuses, or whose answers it hides or rewrites, and
    for a tokenizer without chat template; UsageError as `align`.
    """
    if not isinstance(conversation, Conversation):
        conversation = Conversation(conversation)
    sides = [open_tokenizer(source).encode_turns(conversation) for source in (student, teacher)]
    chunks = [np.empty((0, 4), dtype=np.int64)]
    for turns in zip(sides[0].turns, sides[1].turns, strict=True):
        both = list(zip(sides, turns, strict=True))
        for part, starts in _common_parts(conversation.messages, both, reasoning):
            tokens = (_within(side, start, part) for side, start in zip(sides, starts, strict=True))
            chunks.append(aligner(mode, part)(*tokens))
        closing = [_closing_token(side.encoded, turn) for side, turn in both]
        if None not in closing:
            chunks.append(np.array([[closing[0], closing[0] + 1, closing[1], closing[1] + 1]]))
    return AlignedText(sides[0].encoded.ids, sides[1].encoded.ids, np.concatenate(chunks))


def align_completion(
    student: TokenizerSource,
    teacher: TokenizerSource,
    prompt: str,
    completion: str,
    *,
    mode: str = "byte_offset",
) -> AlignedText:
    """Encode prompt and completion in each model's tokens, as mkd/data does, and align the completion.

    Raises the errors of `align`.
    """
    core = aligner(mode, completion)
    sides = []
    for tokenizer in map(open_tokenizer, (student, teacher)):
        before, after = tokenizer.encode_spans(prompt), tokenizer.encode_spans(completion, continuation=True)
        has_eos = len(before) > 1 and before.ids[-1] == tokenizer.eos_id  # to drop: the completion follows
        before = before.ids[: -1 if has_eos else None]
        outside = np.full(len(before), -1)
        starts, ends = np.append(outside, after.starts), np.append(outside, after.ends)
        sides.append(EncodedText(np.append(before, after.ids), starts, ends))
    return AlignedText(sides[0].ids, sides[1].ids, core(*sides))


def _common_parts(
    messages: Sequence[Mapping], sides: Sequence[tuple[EncodedChat, Turn]], reasoning: bool
) -> list[tuple[str, list[int]]]:
    """Return the parts of a message that both sides render, in order, each with its first bytes there."""
    number, places = sides[0][1].message, list[list[int] | None]()
    for thought, texts in _candidates(messages[number], reasoning):
        places = [_find(side.data, turn, thought, texts) for side, turn in sides]
        if None not in places:
            parts = [thought, *texts] if thought else texts
            return [(part, list(starts)) for part, *starts in zip(parts, *places, strict=True)]
    origin = sides[places.index(None)][0].origin
    raise DataError(
        f"message {number + 1}: the answer cannot be found in what the chat template{origin} writes",
        "it rewrites the answer, so that the two models would read different texts",
        "use a template that keeps answers, or write the record as prompt and completion",
        code="chat-turn-not-found",
    )


def _candidates(message: Mapping, reasoning: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (reasoning, texts of the answer) that templates may keep of a message, longest first.

    They are the whole message, its reasoning and answer between other tags, or the answer alone. An answer
    without reasoning is tried with the blanks around it and without, because many templates strip them.
    Texts around images, and those of tool calls, follow each other.
    """
    calls = message.get("tool_calls") or ()
    for thought, texts in _of_content(message, reasoning):
        for written in _of_calls(calls):
            yield thought, tuple(text for text in texts if text or not written) + written


def _of_content(message: Mapping, reasoning: bool) -> list[tuple[str, tuple[str, ...]]]:
    content, given = message.get("content") or "", reasoning_of(message)[1].strip()
    if not isinstance(content, str):
        texts = tuple(part["text"].strip() for part in content if part.get("text", "").strip())
        found = [("", texts or ("",))]
        return [(given, texts), *found] if reasoning and given and texts else found
    opened, closed, answer = content.rpartition(END_OF_THINK)
    thought = given or (opened.partition(THINK)[2] or opened).strip()
    as_it_is = [("", (answer,))] if answer.strip() and not closed else []
    whole = [("", (content.strip(),))] if closed else []
    alone = ("", (answer.strip(),))
    return [*whole, (thought, alone[1]), alone] if reasoning and thought else [*as_it_is, alone]


def _of_calls(calls: Sequence[Mapping]) -> Iterator[tuple[str, ...]]:
    """Yield the texts of calls that both models may write: names with arguments as JSON, their values, names.

    Templates put other signs around them.
    """
    functions = [call.get("function", call) for call in calls]
    names = [(str(function.get("name")),) for function in functions]
    arguments = [_parsed(function.get("arguments")) for function in functions]
    written = [[json.dumps(one, ensure_ascii=False)] for one in arguments]
    values = [
        [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in of_call.values()]
        for of_call in arguments
    ]
    for of_calls in (written, values, [()] * len(names)) if calls else [()]:
        parts = zip(names, of_calls, strict=True)
        yield tuple(text for name, others in parts for text in (*name, *others) if text.strip())


def _parsed(arguments: Any) -> Mapping:
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        found = None
    return found if isinstance(found, Mapping) else {}


def _find(data: bytes, turn: Turn, thought: str, texts: Sequence[str]) -> list[int] | None:
    """Return the byte where each part starts inside the turn; None unless all parts come, in order.

    A single text is the last one of its kind in the turn.
    """
    end = turn.content_end
    if len(texts) == 1:
        end = data.rfind(texts[0].encode(), turn.start, end)
        if end < 0:
            return None
    places, start = [], turn.start
    if thought:
        opened = data.find(THINK.encode(), start, end)
        place = data.find(thought.encode(), start if opened < 0 else opened + len(THINK), end)
        if place < 0:
            return None
        places, start = [place], place + len(thought.encode())
    for text in texts:
        place = end if len(texts) == 1 else data.find(text.encode(), start, end)
        if place < 0:
            return None
        places.append(place)
        start = place + len(text.encode())
    return places


def _within(side: EncodedChat, start: int, part: str) -> EncodedText:
    """Return all tokens; those inside the part get spans counted from byte `start`, the others none.

    The first token may start with blanks from before the part, because some vocabularies begin words with a
    blank.
    """
    encoded, end = side.encoded, start + len(part.encode())
    blanks = len(side.data[:start]) - len(side.data[:start].rstrip())
    inside = (encoded.starts >= start - blanks) & (encoded.ends > start) & (encoded.ends <= end)
    starts = np.where(inside, np.maximum(encoded.starts - start, 0), -1)
    return EncodedText(encoded.ids, starts, np.where(inside, encoded.ends - start, -1))


def _closing_token(encoded: EncodedText, turn: Turn) -> int | None:
    """Return the number of the token that ends the turn, None if the template writes none."""
    tokens = np.flatnonzero((encoded.starts >= turn.content_end) & (encoded.starts < turn.end))
    return int(tokens[-1]) if len(tokens) else None
