"""The interface of a tokenizer: text to ids and back, and the bytes of its tokens."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mkd.errors import DataError
from mkd.tokenizers.chat import EncodedChat
from mkd.tokenizers.chat_input import Conversation
from mkd.tokenizers.spans import EncodedText, locate, utf8

NAMED_IDS = 3  # most ids that a message names


def without_eos(ids: Sequence[int] | np.ndarray, eos_id: int | None) -> np.ndarray:
    """Return the ids of a document, int64 [n], without the EOS that a tokenizer's configuration adds."""
    return np.asarray(ids[:-1] if len(ids) > 1 and ids[-1] == eos_id else ids, dtype=np.int64)


class Tokenizer(ABC):
    """Text to ids and back; picklable, so that worker processes get exactly the same tokenizer."""

    eos_id: int | None  # None if the tokenizer has no end-of-sequence token
    pad_id: int  # the id that fills packs: the tokenizer's padding token, else EOS, else 0
    is_rebuilt: bool = False  # True if transformers makes other ids of its files, unless told not to
    has_chat_template: bool = False  # True if conversations can become ids

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of one document, with BOS only if the tokenizer's configuration adds it.

        Control tokens spelled out in `text` stay plain text, as far as the library supports that.
        """

    def encode_continuation(self, text: str) -> list[int]:
        """Return the ids of text that follows other text: as `encode`, but never with BOS or EOS."""
        return self.encode(text)

    def encode_with_control_tokens(self, text: str) -> list[int]:
        """Return the ids of a part of a rendered conversation, whose control tokens are written as text.

        Raises DataError for a tokenizer without chat template.
        """
        raise no_chat_template()

    def encode_segments(self, segments: Sequence[tuple[str, bool]]) -> tuple[list[int], list[int]]:
        """Return (ids, loss mask) of a rendered text in segments, each with or without loss.

        The text is encoded as a whole, without added BOS or EOS. Control tokens in it are read. A token that
        holds a character with loss has loss. Raises DataError for a tokenizer that cannot do that.
        """
        raise DataError(
            "the tokenizer reads no control tokens in a text",
            "segments are rendered text, whose control tokens are written out",
            "use a folder with tokenizer.json, or give the record as tokens",
            code="chat-template-missing",
        )

    def encode_spans(self, text: str, *, continuation: bool = False) -> EncodedText:
        """Return the ids of `encode` (or `encode_continuation`) with the bytes of `text` that each spells.

        Raises DataError for a text without a UTF-8 form, UsageError for a tokenizer whose tokens have no
        known bytes.
        """
        data, ids = utf8(text), self.encode(text)
        return locate(ids, np.ones(len(ids), dtype=bool), self.token_bytes, data, lambda: self._offsets(text))

    def _offsets(self, text: str) -> np.ndarray:
        """Return the bytes [n, 2] of each token according to the library, where they are not the text's."""
        raise NotImplementedError

    def apply_chat_template(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        """Return (ids, loss mask) of a conversation.

        The mask is 1 on assistant turns and their end-of-turn token, 0 elsewhere. Raises DataError for a
        conversation that the template refuses or that cannot be masked.
        """
        raise no_chat_template()

    def render(self, conversation: Conversation) -> str:
        """Return the text of a conversation. Raises DataError for one that the chat template refuses."""
        raise no_chat_template()

    def generation_prompt(self, conversation: Conversation) -> list[int]:
        """Return the ids of a conversation up to the beginning of the assistant's next turn.

        Raises DataError for a conversation that the chat template refuses.
        """
        raise no_chat_template()

    def encode_turns(self, conversation: Conversation) -> EncodedChat:
        """Render and encode the conversation, and locate each assistant turn.

        Raises DataError for a conversation that the chat template refuses, or whose turns it hides.
        """
        raise no_chat_template()

    def describe_chat(self) -> list[str]:
        """Return lines for people on how conversations are read; none without a chat template."""
        return []

    def describe_date(self) -> list[str]:
        """Return a line for people on the date that the chat template writes, if it writes one."""
        return []

    @property
    def chat_description(self) -> dict[str, Any]:
        """Entries of a corpus's description: how its conversations were read; none without a template."""
        lines = self.describe_chat()
        return {"chat": lines[0], "chat_date": self.chat_date} if lines else {}

    @property
    def chat_date(self) -> str | None:
        """Date that the chat template writes, if it asks for the present one and the settings name one."""
        return None

    @property
    def chat_variables(self) -> frozenset[str]:
        """Names that the chat template reads and does not set itself; none without a chat template."""
        return frozenset()

    @property
    def has_chat_marks(self) -> bool:
        """True if a chat template has {% generation %} marks: the default one, or the one for tools."""
        return False

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, control tokens included."""

    @property
    @abstractmethod
    def vocabulary(self) -> Mapping[str, int]:
        """String -> id for every token, added and control tokens included."""

    @property
    @abstractmethod
    def special_tokens(self) -> frozenset[str]:
        """Strings that were added to the base vocabulary, and control tokens."""

    @property
    @abstractmethod
    def token_bytes(self) -> tuple[bytes | None, ...]:
        """Bytes that each id adds in the middle of a text, [vocab_size]; None for ids without text.

        Control, special, unknown and unused ids have no text. Raises UsageError if the bytes cannot be known.
        """

    @property
    @abstractmethod
    def roles(self) -> Mapping[str, int]:
        """Role -> id: "bos", "eos", "pad", "unk", and "end_of_turn", which closes an assistant turn."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 over the tokenizer's files: what decides the ids of a text, and its chat template."""

    @property
    def chat_fingerprint(self) -> str:
        """SHA-256 over everything that decides ids and losses of conversations too; the key of caches."""
        return self.fingerprint

    @abstractmethod
    def spellings(self, fragment: bytes) -> Iterator[Sequence[int]]:
        """Yield ids that `fragment` may become inside a text, likeliest first; `spell` checks them."""

    def spell(self, fragment: bytes) -> tuple[int, ...] | None:
        """Return the ids that `fragment` becomes in the middle of a text.

        Their `token_bytes` join to exactly the fragment. Return None if there are no such ids: for half a
        character in a tokenizer without byte tokens, or an empty fragment.
        """
        for ids in self.spellings(fragment) if fragment else ():
            pieces = [piece for piece in (self.token_bytes[i] for i in ids) if piece is not None]
            if len(pieces) == len(ids) and b"".join(pieces) == fragment:
                return tuple(ids)
        return None

    @cached_property
    def vocab_size(self) -> int:
        """Largest id + 1: the least number of rows of an embedding."""
        return max(self.vocabulary.values()) + 1

    def padding_id(self, num_ids: int) -> int:
        """Return an id for padding below `num_ids`: the pad token's, else EOS, else 0. It is never read."""
        return next((one for one in (self.pad_id, self.eos_id) if one is not None and one < num_ids), 0)

    @cached_property
    def vocabulary_fingerprint(self) -> str:
        """SHA-256 over the base vocabulary alone: the same for tokenizers of one family."""
        base = sorted(item for item in self.vocabulary.items() if item[0] not in self.special_tokens)
        return sha256_of(base)

    def named(self, ids: Collection[int]) -> str:
        """Return the first ids with their tokens, and the number of others: "id 0 '</s>' or 4 others"."""
        tokens = {i: token for token, i in self.vocabulary.items() if i in ids}
        names = [
            f"id {i} {tokens[i]!r}" if i in tokens else f"id {i}, which is not a token"
            for i in sorted(ids)[:NAMED_IDS]
        ]
        return " or ".join(names + ([f"{len(ids) - NAMED_IDS} others"] if len(ids) > NAMED_IDS else []))

    def vocabulary_difference(self, other: Tokenizer) -> str | None:
        """Return None if ids mean the same in both tokenizers, else one line with the first differences.

        A string that both know must have the same id in both, and each must know every base string of the
        other. Additional special tokens, padding and chat templates may differ, as they do between models of
        one family.
        """
        mine, theirs = self.vocabulary, other.vocabulary
        compared = (s for s in mine if s not in self.special_tokens or s in theirs)
        differing = {mine[s] for s in compared if theirs.get(s) != mine[s]}
        differing |= {theirs[s] for s in theirs if s not in other.special_tokens and s not in mine}
        if not differing:
            return None
        here, there = ({i: s for s, i in vocabulary.items()} for vocabulary in (mine, theirs))
        first = [f"id {i}: {_shown(here, i)} here, {_shown(there, i)} there" for i in sorted(differing)[:3]]
        return "; ".join([*first, f"{len(mine)} and {len(theirs)} entries"])


def no_chat_template() -> DataError:
    """Return the error for a conversation if the tokenizer has no chat template."""
    return DataError(
        "the tokenizer has no chat template",
        "a record with messages needs one to become tokens",
        "use the tokenizer of an instruction-tuned model, put a chat_template into its "
        "tokenizer_config.json, or write records with prompt and completion",
        code="chat-template-missing",
    )


def sha256_of(content: Any) -> str:
    """Return the SHA-256 of content that JSON can write."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _shown(strings: Mapping[int, str], token_id: int) -> str:
    return repr(strings[token_id]) if token_id in strings else "nothing"
