"""Ids to text, token by token: a character may be spread over several tokens."""

from __future__ import annotations

from collections.abc import Sequence

from mkd.tokenizers.tokenizer import Tokenizer

CONTEXT_TOKENS = 8  # tokens of the prompt that the text is decoded behind, because spaces depend on them
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
MOST_HELD = 8  # tokens of a character; longer ones are not UTF-8, and are shown


class TextStream:
    """Turns a growing completion into text. The pieces joined are the text of the completion."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._ids = list(prompt)[-CONTEXT_TOKENS:]
        self._begin, self._shown = 0, len(self._ids)  # decoded from here on; shown up to here

    def push(self, token: int) -> str:
        """Add an id, and return the text that is certain now."""
        self._ids.append(token)
        return self._advance(is_last=False)

    def end(self) -> str:
        """Return the rest, which may be a part of a character."""
        return self._advance(is_last=True)

    def _advance(self, is_last: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._begin : self._shown])
        after = self._tokenizer.decode(self._ids[self._begin :])
        is_cut = after.endswith(UNFINISHED) and len(self._ids) - self._shown < MOST_HELD
        if len(after) <= len(before) or (is_cut and not is_last):
            return ""
        self._begin, self._shown = self._shown, len(self._ids)
        return after[len(before) :]
