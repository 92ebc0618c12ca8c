"""Prompts that the student completes, as each model of a run reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mkd.config.prompt_template import MADE
from mkd.data.aligned.context_records import ContextTemplate, missing_context
from mkd.tokenizers.chat_input import Conversation
from mkd.tokenizers.tokenizer import Tokenizer, without_eos
from mkd.xtoken.align.align_text import AlignedText


def encode_prompt(prompt: str | Conversation, tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens int64 [p] of a prompt.

    A text gets the tokenizer's BOS if its configuration adds one, and no EOS. A conversation becomes the chat
    template's ids up to the beginning of the next assistant turn. Raises DataError.
    """
    if isinstance(prompt, Conversation):
        return np.asarray(tokenizer.generation_prompt(prompt), dtype=np.int64)
    return without_eos(tokenizer.encode(prompt), tokenizer.eos_id)


@dataclass(frozen=True)
class PromptReader:
    """A teacher that reads prompts in tokens of its own, or other prompts than the student."""

    tokenizer: Tokenizer
    context: ContextTemplate | None = None  # of its prompts; None: it reads those of the student

    def read(self, prompt: str | Conversation, fields: Mapping[str, Any]) -> np.ndarray | None:
        """Return the teacher's tokens int64 [p] of a prompt; None: it leaves the completions out.

        `fields` are the other keys of the record. Raises DataError.
        """
        if self.context is None:
            return encode_prompt(prompt, self.tokenizer)
        found = self.read_made(prompt, fields, {})
        if found is None and not self.context.may_miss and self.longest(prompt, fields) is None:
            raise missing_context(self.context)
        return found

    @property
    def made(self) -> tuple[str, ...]:
        """Fields of its prompts whose values only a step of sampling makes."""
        return () if self.context is None else tuple(one for one in MADE if one in self.context.fields)

    def read_made(
        self, prompt: str | Conversation, fields: Mapping[str, Any], values: Mapping[str, str | None]
    ) -> np.ndarray | None:
        """Return `read`'s tokens with the `values` that a step made; None: a value is missing."""
        assert self.context is not None, "without a context nothing is made"
        known = {key: value for key, value in fields.items() if key not in MADE}
        found = self.context.in_place_of(prompt, {**known, **values})
        return None if found is None else encode_prompt(found, self.tokenizer)

    def is_made_of(self, prompt: str | Conversation | None, fields: Mapping[str, Any]) -> bool:
        """Return True if the teacher's prompt lacks only what a step makes; None: nothing is made of it."""
        return prompt is not None and bool(self.made) and self.longest(prompt, fields) is not None

    def longest(self, prompt: str | Conversation, fields: Mapping[str, Any]) -> np.ndarray | None:
        """Return the prompt with short values for what is made; None: it lacks other values too."""
        return self.read_made(prompt, fields, dict.fromkeys(MADE, "."))


def prompt_sides(prompt: str | Conversation, fields: Mapping[str, Any], teacher: PromptReader) -> AlignedText:
    """Return a prompt as the student reads it, and that of a teacher with a context, for people.

    Both are in the teacher's tokenizer. What a step makes is there by its name, as in the settings. Without a
    context the teacher's side is empty.
    """
    found = teacher.read_made(prompt, fields, {name: f"{{{name}}}" for name in teacher.made})
    theirs = np.zeros(0, np.int64) if found is None else found
    return AlignedText(encode_prompt(prompt, teacher.tokenizer), theirs, np.zeros((0, 4), np.int64))
