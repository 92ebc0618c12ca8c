"""Messages with one of their texts replaced, for the search of turns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mkd.tokenizers.chat_input import REASONING, reasoning_of
from mkd.tokenizers.chat_template import Message, text_part

Change = Callable[[str], Message]  # word -> the message with one of its texts replaced by the word


def changes(message: Message) -> Iterator[tuple[str, int, Change]]:
    """Yield (key, characters, change) of each text of an assistant message."""
    key, reasoning = reasoning_of(message)
    calls = message.get("tool_calls") or []
    if reasoning:
        others = dict.fromkeys(REASONING)
        yield key, len(reasoning), lambda word: {**message, **others, key: word}
    content = message.get("content")
    if content or not (reasoning or calls):
        yield "content", len(content or ""), content_change(message)
    for place, call in enumerate(calls):
        yield "tool_calls", 0, _call_change(message, calls, place, call)


def content_change(message: Message) -> Change:
    return lambda word: {**message, "content": in_form(message.get("content"), word)}


def _call_change(message: Message, calls: Sequence[Any], place: int, call: Any) -> Change:
    def change(word: str) -> Message:
        function = call.get("function", call)
        new = {**function, "arguments": _other_arguments(function.get("arguments"), word)}
        changed = {**call, "function": new} if "function" in call else new
        return {**message, "tool_calls": [*calls[:place], changed, *calls[place + 1 :]]}

    return change


def _other_arguments(arguments: Any, word: str) -> Any:
    """Return arguments of a call with `word` as every value."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return word
        return json.dumps(_other_arguments(parsed, word)) if isinstance(parsed, dict) else word
    if isinstance(arguments, dict) and arguments:
        return dict.fromkeys(arguments, word)
    return {word: word}


def in_form(content: Any, word: str) -> Any:
    """Return `word` as a content of the same form: a text, or a list of parts."""
    return text_part(word) if isinstance(content, list) else word
