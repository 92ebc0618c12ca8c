"""The kinds of records: the keys of each, and the form that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from mkd.data.records.messages import pair_of_answers
from mkd.errors import DataError

TEXT, MESSAGES, PROMPT_COMPLETION, PAIR = "text", "messages", "prompt-completion", "pair"
"""The forms of documents: how a record is tokenised, which of its tokens have loss, and how it is aligned."""


@dataclass(frozen=True)
class RecordKind:
    """The keys of a record, and the form that it becomes."""

    keys: tuple[str, ...]
    form: str
    convert: Callable[..., tuple[Any, ...]] = lambda *values: values
    """Values of the keys -> values of the form.

    They are a text, a conversation, a prompt and a completion, or a prompt with two answers (pairs.py).
    """
    images: str | None = None  # key of the images of messages, if the record has it


KINDS: Mapping[str, RecordKind] = {
    "text": RecordKind(("text",), TEXT),
    "messages": RecordKind(("messages",), MESSAGES, images="images"),
    "pair": RecordKind(("prompt", "chosen", "rejected"), PAIR, pair_of_answers),
    "prompt-completion": RecordKind(("prompt", "completion"), PROMPT_COMPLETION),
}
"""To add a kind of record, name its keys here, and convert their values into those of a form."""

*_OTHERS, _LAST = ("{" + ", ".join(f'"{key}"' for key in kind.keys) + "}" for kind in KINDS.values())
FORMS = f"{', '.join(_OTHERS)} or {_LAST}"


@dataclass(frozen=True)
class Record:
    """One valid record: its form and the form's values."""

    kind: str  # TEXT, MESSAGES, PROMPT_COMPLETION or PAIR
    values: tuple[Any, ...]
    images: tuple[Any, ...] = ()  # of messages, in the order of their places; see messages.py


def unknown_keys(keys: str, found: Iterable[str], where: str = "") -> DataError:
    """Return the error for keys of a record, or columns of a table, that do not make a document."""
    shown = ", ".join(islice(map(repr, found), 8)) or "none"
    why = f"a record has the keys {FORMS}"
    return DataError(
        f"{where}no known {keys} (found: {shown})",
        why,
        f"rename the {keys} of the file",
        code="record-without-known-keys",
    )
