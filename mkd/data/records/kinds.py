"""The kinds of records: the keys of each, and the form that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mkd.data.records.conversations import CONVERSATION_KEYS, MESSAGE_KEYS, PROMPTED_KEYS
from mkd.data.records.format_hints import format_hint, shape_hint
from mkd.data.records.given_loss import (
    are_segments,
    are_tokens,
    read_both_masks,
    read_labelled_ids,
    read_masked_ids,
    read_segments,
    read_tokens,
)
from mkd.errors import DataError

TEXT, MESSAGES, PROMPT_COMPLETION, PAIR = "text", "messages", "prompt-completion", "pair"
SEGMENTS, TOKENS = "segments", "tokens"
"""The forms of documents: how a record is tokenised, which of its tokens have loss, and how it is aligned."""
GIVEN_LOSS = (SEGMENTS, TOKENS)
"""Forms that count only in a record of no other kind: many files keep their tokens beside the text."""


@dataclass(frozen=True)
class RecordKind:
    """The keys of a record, and the form that it becomes."""

    keys: tuple[str, ...]
    form: str
    convert: Callable[..., tuple[Any, ...]] = lambda *values: values
    """Values of the keys -> values of the form: a text, messages, a prompt and a completion, or a pair."""
    optional: tuple[str, ...] = ()  # keys that are read too, if all values are messages
    fits: Callable[[Any], bool] = lambda value: True
    """False for values of other meanings, which are ignored in a record of another kind."""
    is_alias: bool = False  # messages list the kinds without these


KINDS: Mapping[str, RecordKind] = {
    "text": RecordKind(("text",), TEXT),
    "messages": RecordKind(("messages",), MESSAGES, optional=MESSAGE_KEYS),
    "conversations": RecordKind(("conversations",), MESSAGES, optional=MESSAGE_KEYS),
    "pair": RecordKind(("prompt", "chosen", "rejected"), PAIR, optional=CONVERSATION_KEYS),
    "segments": RecordKind(("segments",), SEGMENTS, read_segments, fits=are_segments),
    "tokens": RecordKind(("tokens",), TOKENS, read_tokens, fits=are_tokens),
    "labels": RecordKind(("input_ids", "labels"), TOKENS, read_labelled_ids, is_alias=True),
    "completion-mask": RecordKind(("input_ids", "completion_mask"), TOKENS, read_masked_ids, is_alias=True),
    "assistant-masks": RecordKind(("input_ids", "assistant_masks"), TOKENS, read_masked_ids, is_alias=True),
    "both-masks": RecordKind(
        ("input_ids", "completion_mask", "assistant_masks"), TOKENS, read_both_masks, is_alias=True
    ),
    "prompt-completion": RecordKind(("prompt", "completion"), PROMPT_COMPLETION, optional=PROMPTED_KEYS),
}
"""To add a kind of record, name its keys here, and convert their values into those of a form."""

*_OTHERS, _LAST = (
    "{" + ", ".join(f'"{key}"' for key in kind.keys) + "}" for kind in KINDS.values() if not kind.is_alias
)
FORMS = f"{', '.join(_OTHERS)} or {_LAST}"


@dataclass(frozen=True)
class Record:
    """One valid record: its form and the form's values.

    They are a text, a Conversation, a prompt and a completion as texts, a prompt with two answers, which are
    texts or Conversations, the Segments, or the Tokens.
    """

    kind: str  # TEXT, MESSAGES, PROMPT_COMPLETION, PAIR, SEGMENTS or TOKENS
    values: tuple[Any, ...]
    images: tuple[Any, ...] = ()  # of messages, in the order of their places; see messages.py
    ignored: tuple[str, ...] = field(default=(), compare=False)  # keys with a value that nothing reads
    numbers: tuple[float, ...] = ()  # see `WantedRecords.numbers`
    tag: str = ""  # see `WantedRecords.tag`; "": it has none
    context: Mapping[str, Any] = field(default_factory=dict)  # values of `WantedRecords.context`, as given


def unknown_keys(keys: str, found: Iterable[str], where: str = "") -> DataError:
    """Return the error for keys of a record, or columns of a table, that do not make a document."""
    by_shape = shape_hint(found) if isinstance(found, Mapping) else None
    found = list(found)
    shown = ", ".join(map(repr, found[:8])) or "none"
    why = f"a record has the keys {FORMS}"
    return DataError(
        f"{where}no known {keys} (found: {shown})",
        why,
        format_hint(found, is_table=keys == "columns") or by_shape or f"rename the {keys} of the file",
        code="record-without-known-keys",
    )
