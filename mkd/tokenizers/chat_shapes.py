"""Turns of conversations of a known shape, found without rendering them again.

The shape of a conversation is the same conversation with a word in place of each text. Its turns are
searched and checked once. If a later conversation renders to the shape with its own texts in place of the
words, letter by letter, its turns are at the same places.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mkd.errors import DataError
from mkd.tokenizers.chat_input import REASONING, Conversation
from mkd.tokenizers.chat_template import ChatTemplate, Message
from mkd.tokenizers.chat_turns import TurnPlace, TurnSearch, require_tools

MAX_SHAPES = 1024  # kept at a time
WORD = re.compile(r"qz\d{5}zq")
Border = tuple[int, int]  # number of a segment, characters from its start


@dataclass(frozen=True)
class Shape:
    """A rendered shape: text that does not change, and the texts between."""

    segments: tuple[str, ...]  # one more than there are slots
    slots: tuple[int, ...]  # numbers of the texts between the segments
    turns: Mapping[int, tuple[Border, Border, Border]]  # message -> start, end of the content, end

    def turns_in(self, text: str, texts: Sequence[tuple[str, ...]]) -> dict[int, TurnPlace] | None:
        """Return the turns of a rendered conversation; None if it is not this shape with these texts.

        `texts` has the forms that a template may write of each text.
        """
        at, starts = 0, []
        for segment, slot in zip(self.segments, (*self.slots, None), strict=True):
            if not text.startswith(segment, at):
                return None
            starts.append(at)
            at += len(segment)
            if slot is not None:
                following = self.segments[len(starts)]
                fitting = (one for one in texts[slot] if text.startswith(one + following, at))
                form = next(fitting, None)
                if form is None:
                    return None
                at += len(form)
        if at != len(text):
            return None
        return {
            number: TurnPlace(*(starts[segment] + offset for segment, offset in borders))
            for number, borders in self.turns.items()
        }


class KnownShapes:
    """The shapes that were met so far in one template."""

    def __init__(self, template: ChatTemplate, closing: str | None):
        self._template, self._closing = template, closing  # see `TurnSearch`
        self._known: dict[bytes, Shape | None] = {}

    def turns(self, conversation: Conversation, text: str) -> dict[int, TurnPlace] | None:
        """Return the turn of each assistant message; None if the shape does not tell.

        If it does, the template writes the tools and calls of the conversation.
        """
        words = _Words()
        outline = replace(conversation, messages=[_outlined(one, words) for one in conversation.messages])
        content = [outline.messages, conversation.tools, dict(conversation.template_kwargs)]
        key = hashlib.sha256(json.dumps(content, default=str).encode()).digest()
        if key not in self._known:
            if len(self._known) >= MAX_SHAPES:
                self._known.clear()
            self._known[key] = self._rendered(outline, words)
        shape = self._known[key]
        return None if shape is None else shape.turns_in(text, words.texts)

    def _rendered(self, outline: Conversation, words: _Words) -> Shape | None:
        """Return the shape of an outline; None if its turns cannot be found."""
        try:
            text = self._template.render(outline)
            require_tools(self._template, outline, text)
            turns = TurnSearch(self._template, outline, text, self._closing).turns()
        except DataError:
            return None
        found = list(words.places(text))
        starts = [0, *(end for _, _, end in found)]
        segments = tuple(
            text[start:end] for start, end in zip(starts, [*(s for _, s, _ in found), len(text)], strict=True)
        )

        def border(place: int) -> Border | None:
            for number, (start, segment) in enumerate(zip(starts, segments, strict=True)):
                if start <= place <= start + len(segment):
                    return number, place - start
            return None  # inside a word

        borders = {
            number: tuple(border(place) for place in (one.start, one.content_end, one.end))
            for number, one in turns.items()
        }
        if any(None in one for one in borders.values()):
            return None
        return Shape(segments, tuple(slot for slot, _, _ in found), borders)  # type: ignore[arg-type]


class _Words:
    """The words of an outline, and the texts in whose places they stand."""

    def __init__(self) -> None:
        self.texts: list[tuple[str, ...]] = []  # forms that a template may write of each text
        self._names: dict[str, str] = {}
        self._arguments: dict[str, int] = {}  # JSON of outlined arguments -> number of their text

    def of_text(self, text: str) -> str:
        """Return the word for a text, of which templates may write the part without blanks at its ends."""
        forms = (text, text.strip(), text.lstrip(), text.rstrip(), text.lstrip("\n"), text.strip("\n"))
        return self._word(tuple(dict.fromkeys(forms)))

    def of_name(self, name: str) -> str:
        """Return the word for a name or an id, wherever it stands. As Mistral's ids it has 9 characters."""
        if name not in self._names:
            self._names[name] = self._word((name,))
        return self._names[name]

    def of_arguments(self, arguments: Any) -> Any:
        """Return arguments of a call with words as values, in their form: an object, or its JSON as text."""
        parsed = arguments
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments)
            except ValueError:
                return self.of_text(arguments)
        if not isinstance(parsed, dict) or not parsed:
            return arguments
        number = len(self.texts)
        outlined = dict.fromkeys(parsed, self._word((_dumped(parsed),)))
        self._arguments[_dumped(outlined)] = number
        return _dumped(outlined) if isinstance(arguments, str) else outlined

    def places(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yield (number of the text, start, end) in the rendered outline, in order."""
        whole = [
            (found.start(), found.end(), number)
            for written, number in self._arguments.items()
            for found in re.finditer(re.escape(written), text)
        ]
        at = 0
        for word in WORD.finditer(text):
            if word.start() < at:
                continue  # of arguments that were taken as a whole
            start, end, number = next(
                (one for one in whole if one[0] <= word.start() < one[1]),
                (word.start(), word.end(), int(word[0][2:7])),
            )
            yield number, start, end
            at = end

    def _word(self, forms: tuple[str, ...]) -> str:
        self.texts.append(forms)
        return f"qz{len(self.texts) - 1:05d}zq"


def _dumped(arguments: Any) -> str:
    """Return the JSON that templates write of an object."""
    return json.dumps(arguments, ensure_ascii=False)


def _outlined(message: Message, words: _Words) -> Message:
    """Return the message with a word in place of each text, name and id. Empty texts stay."""
    found = dict(message)
    for key in ("content", *REASONING):
        if isinstance(found.get(key), str) and found[key]:
            found[key] = words.of_text(found[key])
    for key in ("name", "tool_call_id"):
        if isinstance(found.get(key), str):
            found[key] = words.of_name(found[key])
    if isinstance(found.get("content"), list):
        found["content"] = [
            {**part, "text": words.of_text(part["text"])} if part.get("text") else part
            for part in found["content"]
        ]
    if isinstance(found.get("tool_calls"), list):
        found["tool_calls"] = [_outlined_call(call, words) for call in found["tool_calls"]]
    return found


def _outlined_call(call: Any, words: _Words) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return call
    arguments = words.of_arguments(function["arguments"]) if "arguments" in function else None
    outlined = {**function, "name": words.of_name(function["name"])}
    named = {"id": words.of_name(call["id"])} if isinstance(call.get("id"), str) else {}
    return {
        **call,
        **named,
        "function": outlined if arguments is None else {**outlined, "arguments": arguments},
    }
