"""The places of the assistant's turns in a rendered conversation, for templates without marks.

One text of a message is changed and the conversation rendered again: where the two renderings differ, that
text stands. A result counts only after a check: no text of another message lies inside a turn, and all texts
of its own message do. All places are in characters of the rendered conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mkd.errors import DataError
from mkd.tokenizers.chat_input import ASSISTANT, PROBE, Conversation
from mkd.tokenizers.chat_template import ChatTemplate, Message
from mkd.tokenizers.message_changes import Change, changes, content_change, in_form

SAME_ENDING = 16  # characters, by which the end of a conversation is known again
Place = tuple[int, int]


@dataclass(frozen=True)
class TurnPlace:
    """The place of an assistant message in the rendered conversation, in characters."""

    start: int  # end of the generation prompt
    content_end: int  # end of the content
    end: int  # end of the tokens that close the turn; content_end if there are none


@dataclass(frozen=True)
class OwnText:
    """One text of an assistant message, and where the template writes it."""

    key: str  # of the message: content, one of REASONING, or tool_calls
    length: int  # characters
    place: Place | None  # None: the template does not write it


class TurnSearch:
    """Finds the turns of one conversation."""

    def __init__(
        self,
        template: ChatTemplate,
        conversation: Conversation,
        text: str,  # the rendered conversation
        closing: str | None,  # token that must end every turn, see `closing_token`; None: any end will do
    ):
        self._template, self._conversation, self._text = template, conversation, text
        self._closing_tokens = () if closing is None else (closing,)
        self._messages = conversation.messages
        filler = "q0"
        while filler in text:
            filler += "0"
        self._words = ("b" + filler + "d", "x" + filler + "y")  # no common first or last character
        self.numbers = [n for n, one in enumerate(self._messages) if one["role"] == ASSISTANT]

    @cached_property
    def own_texts(self) -> dict[int, list[OwnText]]:
        """The texts of each assistant message; those that the template refuses to change are missing.

        Raises DataError if the template drops a call.
        """
        found = {}
        for number in self.numbers:
            texts = []
            for key, length, change in changes(self._messages[number]):
                is_known, place = self._place(number, change)
                if key == "tool_calls" and is_known and place is None:
                    raise _drops_a_call(self._template, number)
                if is_known:
                    texts.append(OwnText(key, length, place))
            found[number] = texts
        return found

    def require_calls(self) -> None:
        """Raise DataError if the template drops a call."""
        if any(message.get("tool_calls") for message in self._messages):
            assert self.own_texts is not None

    def turns(self, uses_marks: bool = False) -> dict[int, TurnPlace]:
        """Return the turn of each assistant message. Raises DataError if they cannot be found for certain.

        `uses_marks`: the caller would not need them if the template marked its turns.
        """
        if not self.numbers:
            return {}
        own, missing = self.own_texts, []
        for method in (self._by_answer, self._by_texts):
            found: dict[int, TurnPlace] = {}
            for number in self.numbers:
                turn = method(number, found)
                if turn is None:
                    break
                found[number] = turn
            if len(found) == len(self.numbers) and self._is_right(found, own):
                return found
            missing.append(next((number for number in self.numbers if number not in found), self.numbers[0]))
        raise _turn_not_found(self._template, missing[0], uses_marks)

    def _by_answer(self, number: int, before: dict[int, TurnPlace]) -> TurnPlace | None:
        """Find a turn by two answers in the place of the whole message.

        What follows an answer is the end of the turn, and its beginning is that of the generation prompt.
        If the template has no prompt, or none that begins the text, it is where the answer stands, or the
        blanks that the template writes before it.
        """
        first, second = (self._answered(number, word) for word in self._words)
        if first is None or second is None:
            return None
        before_word, _, after = first.partition(self._words[0])
        tail = common(self._text, after, from_end=True)
        content_end = len(self._text) - tail
        if tail == len(after):
            end = content_end + closing_length(self._text, content_end, self._template)
        else:  # another token ends this turn; the border may lie inside it
            content_end, end = self._snapped(content_end, down=True), self._snapped(content_end)
        start = self._prompt_end(number, end)
        if start is None and self._text.startswith(before_word):
            start = self._before_blanks(number, len(before_word))
        if start is None:
            shared = min(common(self._text, first), common(self._text, second))
            start = self._snapped(shared, down=True)
        return TurnPlace(start, max(start, content_end), end) if start <= end else None

    def _answered(self, number: int, word: str) -> str | None:
        """Return the conversation with the answer `word`, without calls unless the template wants them."""
        message = self._messages[number]
        answer = {"role": ASSISTANT, "content": in_form(message.get("content"), word)}
        for kept in ({}, {"tool_calls": message.get("tool_calls")}):
            rendered = self._changed(number, {**answer, **kept})
            if rendered is not None:
                return rendered if rendered.count(word) == 1 else None
        return None

    def _by_texts(self, number: int, before: dict[int, TurnPlace]) -> TurnPlace | None:
        """Find a turn by its texts: from the generation prompt over all of them to the token that ends it."""
        places = [one.place for one in self.own_texts[number] if one.place is not None]
        if not places:
            return None
        first, last = min(start for start, _ in places), max(end for _, end in places)
        has_calls = bool(self._messages[number].get("tool_calls"))
        content_end, end = self._ending(number, self._snapped(last)) if has_calls else (last, last)
        if not has_calls:
            end = last + closing_length(self._text, last, self._template)
        elif end == content_end:
            return None  # a call without a token that ends it
        least = max((turn.end for turn in before.values()), default=0)
        start = self._prompt_end(number, first)
        if start is None:
            start = self._prompt_part(number, least, first)
        if start is None:
            start = self._after_previous(number, first) if has_calls else self._before_blanks(number, first)
        return None if start is None or start < least else TurnPlace(start, max(start, content_end), end)

    def _prompt_end(self, number: int, limit: int) -> int | None:
        """Return the end of the generation prompt, if it begins the text and ends before `limit`."""
        prompt = self._template.prompt(self._conversation.beginning(number))
        is_there = prompt is not None and self._text.startswith(prompt) and len(prompt) <= limit
        return len(prompt) if is_there and prompt is not None else None

    def _prompt_part(self, number: int, least: int, limit: int) -> int | None:
        """Return the end of the larger part of the generation prompt, if the text has only that part."""
        before = self._conversation.beginning(number)
        prompt = self._template.prompt(before)
        if prompt is None:
            return None
        header = prompt[common(prompt, self._template.render(before)) :]
        for length in range(len(header), len(header) // 2, -1):
            place = self._text.rfind(header[:length], least, limit)
            if place >= 0:
                return place + length
        return None

    def _before_blanks(self, number: int, start: int) -> int:
        """Return `start` without the blanks that a template without prompt writes before an answer.

        A completion begins where the messages before end, so the model has to write these blanks.
        """
        before = self._conversation.beginning(number)
        if not number or self._template.prompt(before) is not None:
            return start
        asked = self._template.render(before)
        ending, place = asked.rstrip(), len(self._text[:start].rstrip())
        if not ending or not self._text[:place].endswith(ending[-SAME_ENDING:]):
            return start
        return min(start, place + len(asked) - len(ending))

    def _after_previous(self, number: int, limit: int) -> int | None:
        """Return the end of the token that closes the message before, for templates without prompt."""
        if number == 0:
            return None
        _, place = self._place(number - 1, content_change(self._messages[number - 1]))
        return None if place is None else self._end_of_first(self._template.controls, place[1], limit)

    def _ending(self, number: int, last: int) -> tuple[int, int]:
        """Return (end of the content, end) of a turn whose last call is changed up to `last`.

        It ends with the first token that ends turns, if that stands before the next message. Both are equal
        if there is none.
        """
        limit = len(self._text)
        if number + 1 < len(self._messages):
            is_known, place = self._place(number + 1, content_change(self._messages[number + 1]))
            if not is_known or place is None:
                return last, last
            limit = place[0]
        end = self._end_of_first([*self._template.stops, *self._closing_tokens], last, limit)
        return (last, last) if end is None else (last, end)

    def _end_of_first(self, tokens: Sequence[str], first: int, limit: int) -> int | None:
        ends = [(at, at + len(one)) for one in tokens if (at := self._text.find(one, first, limit)) >= 0]
        return min(ends, key=lambda one: (one[0], -one[1]))[1] if ends else None

    def _is_right(self, turns: dict[int, TurnPlace], own: dict[int, list[OwnText]]) -> bool:
        """Return True if each turn holds the texts of its message, and no turn those of another one."""
        borders = [border for turn in turns.values() for border in (turn.start, turn.end)]
        if borders != sorted(borders):
            return False
        for number, turn in turns.items():
            if self._closing_tokens and turn.end == turn.content_end:
                return False  # no closing token follows the content
            places = [one.place for one in own[number] if one.place is not None]
            if not all(turn.start <= start and end <= turn.end for start, end in places):
                return False
        return all(
            start >= turn.end or end <= turn.start
            for start, end in self._foreign_places()
            for turn in turns.values()
        )

    def _foreign_places(self) -> Iterator[Place]:
        for number, message in enumerate(self._messages):
            if message["role"] != ASSISTANT:
                _, place = self._place(number, content_change(message))
                if place is not None and place[0] < place[1]:
                    yield place

    def _place(self, number: int, change: Change) -> tuple[bool, Place | None]:
        """Return (True if the template takes the change, where the text stands or None if it is dropped)."""
        rendered = [self._changed(number, change(word)) for word in self._words]
        if None in rendered:
            return False, None
        if self._text in rendered:
            return True, None
        places = [difference(self._text, one) for one in rendered if one is not None]
        return True, (min(start for start, _ in places), max(end for _, end in places))

    def _changed(self, number: int, message: Message) -> str | None:
        messages = [*self._messages[:number], message, *self._messages[number + 1 :]]
        try:
            return self._template.render(replace(self._conversation, messages=messages))
        except DataError:
            return None

    def _snapped(self, place: int, down: bool = False) -> int:
        """Move a border that lies inside a control token to its end, or `down` to its start."""
        for token in self._template.controls:
            start = self._text.find(token, max(0, place - len(token) + 1), place + len(token) - 1)
            if 0 <= start < place < start + len(token):
                return start if down else start + len(token)
        return place


def closing_length(text: str, place: int, template: ChatTemplate) -> int:
    """Count characters from `place` through the control token that closes a turn; 0 if there is none.

    Blanks before it count. Tokens that follow at once count if they lead to one that ends completions.
    """
    at = len(text) - len(text[place:].lstrip())
    first = next((token for token in template.controls if text.startswith(token, at)), None)
    if first is None:
        return 0
    end = at = at + len(first)
    found: str | None = first
    while found is not None and found not in template.stops:
        found = next((token for token in template.controls if text.startswith(token, at)), None)
        at += len(found or "")
    return (end if found is None else at) - place


def closing_token(template: ChatTemplate) -> str | None:
    """Return the control token that ends an assistant's turn in the template, the last one if several do."""
    probe = Conversation(PROBE)
    try:
        text = template.render(probe)
        turn = TurnSearch(template, probe, text, closing=None).turns()[1]
    except DataError:
        return None
    closing = text[turn.content_end : turn.end].strip()
    return next((one for one in template.controls if closing.endswith(one)), None)


def require_tools(
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
            f"the chat template{template.origin} does not write the record's tools",
            "the model would learn to call functions that it is not told about",
            "use a chat template that writes tools, or write them into the system message",
            code="chat-template-drops-tools",
        )


def common(one: str, other: str, from_end: bool = False) -> int:
    """Return the length of the common beginning (or end) of two texts. Slices are compared, which is fast."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if from_end:
            is_same = one[len(one) - middle :] == other[len(other) - middle :]
        else:
            is_same = one[:middle] == other[:middle]
        low, high = (middle, high) if is_same else (low, middle - 1)
    return low


def difference(text: str, other: str) -> Place:
    """Return the part of `text` outside the common beginning and end with `other`."""
    start, end = common(text, other), len(text) - common(text, other, from_end=True)
    return min(start, end), max(start, end)


def _turn_not_found(template: ChatTemplate, number: int, uses_marks: bool) -> DataError:
    """Return the error for an assistant message, counted from 0, whose turn is not known."""
    what = f"message {number + 1}: mkd cannot find its turn in what the chat template{template.origin} writes"
    why = "it rewrites assistant turns, or ends a call with no token that generation_config.json lists"
    do = "write the record as prompt and completion, or use a template that keeps answers and closes turns"
    if uses_marks:
        why += "; it has no {% generation %} marks around them"
        do = "add {% generation %} marks to it, or write the record as prompt and completion"
    return DataError(what, why, do, code="chat-turn-not-found")


def _drops_a_call(template: ChatTemplate, number: int) -> DataError:
    return DataError(
        f"message {number + 1}: the chat template{template.origin} does not write its tool_calls",
        "the model would learn an answer without the call",
        "use a chat template that writes every call, give each call a message, or write it into the content",
        code="chat-template-drops-tools",
    )
