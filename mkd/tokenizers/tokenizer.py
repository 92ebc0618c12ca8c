"""The interface of a tokenizer: text to ids and back, and what its tokens are in bytes."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from mkd.errors import DataError
from mkd.tokenizers.chat import EncodedChat
from mkd.tokenizers.spans import EncodedText


class Tokenizer(ABC):
    """Text to ids and back. Instances can be pickled, so that worker processes get the very same tokenizer."""

    eos_id: int | None  # None when the tokenizer has no end-of-sequence token
    pad_id: int  # what fills packs: the tokenizer's padding token, else EOS, else 0
    has_chat_template: bool = False  # so that conversations can become ids

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of one document: BOS only where the tokenizer's own configuration adds it.

        Control tokens spelled out in `text` stay plain text as far as the library can do that.
        """

    @abstractmethod
    def encode_continuation(self, text: str) -> list[int]:
        """The ids of text that follows other text: as `encode`, never with BOS or EOS."""

    @abstractmethod
    def encode_spans(self, text: str, *, continuation: bool = False) -> EncodedText:
        """The ids of `encode` (or of `encode_continuation`) with the bytes of `text` that each stands for.

        Raises DataError for a text that has no UTF-8 form, UsageError for a tokenizer whose tokens have no known bytes.
        """

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
        """(ids of the template, loss mask): 1 on assistant turns and their end-of-turn token, 0 elsewhere.

        Raises DataError for a conversation that the template refuses or that cannot be masked.
        """
        raise no_chat_template()

    def encode_turns(self, messages: Sequence[Mapping[str, Any]]) -> EncodedChat:
        """The conversation under the tokenizer's chat template, with the place of each assistant turn.

        Raises DataError for a conversation that the template refuses, or whose assistant turns it hides.
        """
        raise no_chat_template()

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens included."""

    @property
    @abstractmethod
    def vocabulary(self) -> Mapping[str, int]:
        """Every string of the tokenizer, added and control tokens included -> its id."""

    @property
    @abstractmethod
    def special_tokens(self) -> frozenset[str]:
        """Strings that were added to the base vocabulary or only steer the model."""

    @property
    @abstractmethod
    def token_bytes(self) -> tuple[bytes | None, ...]:
        """[vocab_size]: what each id adds to a text in the middle of it; None for ids that stand for no text.

        Those are control, special, unknown and unused ids. Raises UsageError where the bytes cannot be known.
        """

    @property
    @abstractmethod
    def roles(self) -> Mapping[str, int]:
        """The ids of "bos", "eos", "pad", "unk" and "end_of_turn" (what closes an assistant turn), those that exist."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 over all that decides the ids of a text or of a conversation; the key of token caches."""

    @abstractmethod
    def spellings(self, fragment: bytes) -> Iterator[Sequence[int]]:
        """Ids that `fragment` may become in the middle of a text, likeliest first; `spell` checks them."""

    def spell(self, fragment: bytes) -> tuple[int, ...] | None:
        """The ids that `fragment` becomes in the middle of a text; their `token_bytes` join to exactly it.

        None where there are none: half a character in a tokenizer without bytes as tokens, an empty fragment.
        """
        for ids in self.spellings(fragment) if fragment else ():
            pieces = [piece for piece in (self.token_bytes[i] for i in ids) if piece is not None]
            if len(pieces) == len(ids) and b"".join(pieces) == fragment:
                return tuple(ids)
        return None

    @cached_property
    def vocab_size(self) -> int:
        """Largest id + 1: the rows that an embedding needs at least."""
        return max(self.vocabulary.values()) + 1

    @cached_property
    def vocabulary_fingerprint(self) -> str:
        """SHA-256 over the base vocabulary alone: the same for tokenizers of one family."""
        base = sorted(item for item in self.vocabulary.items() if item[0] not in self.special_tokens)
        return sha256_of(base)

    def vocabulary_difference(self, other: Tokenizer) -> str | None:
        """None if ids mean the same to both, else one line that names the first differences.

        A string that both know must have one id, and a base string of one must be known to the other. Additional
        special tokens, padding and chat templates do not count: models of one family differ in them.
        """
        mine, theirs = self.vocabulary, other.vocabulary
        differing = [
            *(
                mine[s]
                for s in mine
                if s not in self.special_tokens or s in theirs
                if theirs.get(s) != mine[s]
            ),
            *(theirs[s] for s in theirs if s not in other.special_tokens and s not in mine),
        ]
        if not differing:
            return None
        here, there = ({i: s for s, i in vocabulary.items()} for vocabulary in (mine, theirs))
        first = [
            f"id {i}: {_shown(here, i)} here, {_shown(there, i)} there" for i in sorted(set(differing))[:3]
        ]
        return "; ".join([*first, f"{len(mine)} and {len(theirs)} entries"])


def no_chat_template() -> DataError:
    """The error of a conversation that meets a tokenizer without chat template."""
    return DataError(
        "the tokenizer has no chat template",
        "a record with messages needs one to become tokens",
        "use the tokenizer of an instruction-tuned model, put a chat_template into its tokenizer_config.json, or write records "
        "with prompt and completion",
        code="chat-template-missing",
    )


def sha256_of(content: object) -> str:
    """SHA-256 of content that JSON can write."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _shown(strings: Mapping[int, str], token_id: int) -> str:
    return repr(strings[token_id]) if token_id in strings else "nothing"
