"""Alignment of conversations, each model's under its own chat template, and of prompts with completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mkd.errors import DataError
from mkd.tokenizers.chat import EncodedChat, Turn
from mkd.tokenizers.load import open_tokenizer
from mkd.tokenizers.spans import EncodedText
from mkd.xtoken.align.align_text import AlignedText, TokenizerSource, aligner

THINK, END_OF_THINK = "<think>", "</think>"


def align_chat(
    student: TokenizerSource,
    teacher: TokenizerSource,
    messages: Sequence[Mapping],
    *,
    reasoning: bool = True,
    mode: str = "byte_offset",
) -> AlignedText:
    """Each model's own rendering of the conversation; chunks in assistant messages only.

    Every assistant message whose turn both templates close with a control token adds that pair as a chunk of its own, so
    that the student learns to stop. Reasoning (`<think>` ... `</think>`, or the field reasoning_content) is aligned where
    both templates keep it, unless `reasoning` is False. Raises DataError for a conversation that a template refuses,
    or whose answers it hides or rewrites, and for a tokenizer without chat template; UsageError as `align`.
    """
    sides = [open_tokenizer(source).encode_turns(messages) for source in (student, teacher)]
    chunks = [np.empty((0, 4), dtype=np.int64)]
    for turns in zip(sides[0].turns, sides[1].turns, strict=True):
        both = list(zip(sides, turns, strict=True))
        for part, starts in _common_parts(messages, both, reasoning):
            chunks.append(
                aligner(mode, part)(
                    *(_within(side, start, part) for side, start in zip(sides, starts, strict=True))
                )
            )
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
    """The prompt and then the completion in each model's tokens, both as the data side encodes them; chunks in the completion.

    Raises as `align`.
    """
    core = aligner(mode, completion)
    sides = []
    for tokenizer in map(open_tokenizer, (student, teacher)):
        before, after = tokenizer.encode_spans(prompt), tokenizer.encode_spans(completion, continuation=True)
        before = before.ids[
            : -1 if len(before) > 1 and before.ids[-1] == tokenizer.eos_id else None
        ]  # it goes on
        outside = np.full(len(before), -1)
        starts, ends = np.append(outside, after.starts), np.append(outside, after.ends)
        sides.append(EncodedText(np.append(before, after.ids), starts, ends))
    return AlignedText(sides[0].ids, sides[1].ids, core(*sides))


def _common_parts(
    messages: Sequence[Mapping], sides: Sequence[tuple[EncodedChat, Turn]], reasoning: bool
) -> list[tuple[str, list[int]]]:
    """Parts of an assistant message that both sides render, in order, and the byte where each starts in the renderings."""
    number = sides[0][1].message
    for parts in _candidates(messages[number], reasoning):
        places = [_find(side.data, turn, parts) for side, turn in sides]
        if None not in places:
            return [(part, list(starts)) for part, *starts in zip(parts, *places, strict=True)]
    raise DataError(
        f"message {number + 1}: the answer cannot be found in the rendered conversation",
        "the chat template of one model rewrites it, so that the two models read different texts",
        "use models whose templates keep answers, or write the record as prompt and completion",
        code="chat-turn-not-found",
    )


def _candidates(message: Mapping, reasoning: bool) -> list[tuple[str, ...]]:
    """What templates keep of a message, most first: all of it as it is, its parts between other tags, or the answer only.

    An answer without reasoning with the blanks around it and without, which many templates strip.
    """
    content = message["content"] or ""
    if not isinstance(content, str):
        raise DataError(
            f"the content of an assistant message is a {type(content).__name__}",
            "answers are aligned by the bytes of their text",
            "write the content as one string",
            code="record-message-not-text",
        )
    opened, closed, answer = content.rpartition(END_OF_THINK)
    thought = (message.get("reasoning_content") or opened.partition(THINK)[2] or opened).strip()
    as_it_is = [(answer,)] if answer.strip() and not closed else []
    parts = (thought, answer.strip())
    whole = [(content.strip(),)] if closed else []
    return [*whole, parts, parts[1:]] if reasoning and thought else [*as_it_is, parts[1:]]


def _find(data: bytes, turn: Turn, parts: Sequence[str]) -> list[int] | None:
    """Byte of `data` where each part starts inside the turn; None unless all are there, one after the other."""
    *thought, answer = (part.encode() for part in parts)
    end = data.rfind(answer, turn.start, turn.content_end)
    if end < 0 or not thought:
        return None if end < 0 else [end]
    opened = data.find(THINK.encode(), turn.start, end)
    start = data.find(thought[0], turn.start if opened < 0 else opened + len(THINK), end)
    return None if start < 0 else [start, end]


def _within(side: EncodedChat, start: int, part: str) -> EncodedText:
    """All tokens, with spans counted from byte `start` for those inside the part, and without spans for the others.

    The first token may bring blanks from before the part along: some vocabularies begin words with them.
    """
    encoded, end = side.encoded, start + len(part.encode())
    blanks = len(side.data[:start]) - len(side.data[:start].rstrip())
    inside = (encoded.starts >= start - blanks) & (encoded.ends > start) & (encoded.ends <= end)
    starts = np.where(inside, np.maximum(encoded.starts - start, 0), -1)
    return EncodedText(encoded.ids, starts, np.where(inside, encoded.ends - start, -1))


def _closing_token(encoded: EncodedText, turn: Turn) -> int | None:
    """Number of the token that ends the turn, None where the template writes none."""
    tokens = np.flatnonzero((encoded.starts >= turn.content_end) & (encoded.starts < turn.end))
    return int(tokens[-1]) if len(tokens) else None
