"""Prompts that the student completes, as each model of a run reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mkd.data.aligned.context_records import ContextTemplate, missing_context
from mkd.tokenizers.chat_input import Conversation
from mkd.tokenizers.tokenizer import Tokenizer, without_eos


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
        found = self.context.in_place_of(prompt, fields)
        if found is None:
            if not self.context.may_miss:
                raise missing_context(self.context)
            return None
        return encode_prompt(found, self.tokenizer)
