"""Notes about a file of records: keys and columns that nothing reads, texts that look like conversations."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

from mkd.data.records.ignored_keys import IgnoredKeys, conversations_of, reasoning_note, without_loss_note
from mkd.data.records.kinds import Record
from mkd.data.records.messages import texts_of
from mkd.data.records.parsing import parse_row
from mkd.data.records.rows import read_rows, unread_columns
from mkd.errors import DataError
from mkd.tokenizers.chat_input import PROBE, Conversation
from mkd.tokenizers.tokenizer import Tokenizer

LOG = logging.getLogger("mkd")
LOOKED_AT = 100  # records of a file


def file_notes(path: str, keys: IgnoredKeys, tokenizer: Tokenizer, numbers: Sequence[str] = ()) -> list[str]:
    """Return what every start of a run says about the file.

    Of its records `keys` were ignored, and `numbers` are read.
    """
    found = replace(keys, records=keys.records + unread_columns(path, numbers))
    records = list(_records(path))
    notes = (
        *(str(found), without_loss_note(keys.without_loss), reasoning_note(keys.reasoning)),
        control_token_note([text for one in records if (text := _letters(one)) is not None], tokenizer),
        rendered_message_note([one for record in records for one in conversations_of(record)], tokenizer),
    )
    return [note for note in notes if note]


def note_lines(meta: Mapping[str, Any], path: str | None = None) -> list[str]:
    """Return the notes in the description of a corpus, each after the name of its file.

    A corpus of one file, found in the cache by its content, is called `path`.
    """
    notes = meta.get("notes", {})
    names = {one: path if path and len(meta["sources"]) == 1 else one for one in notes}
    return [f"{names[one]}: {note}" for one, said in notes.items() for note in said]


def log_notes(meta: Mapping[str, Any], path: str | None = None) -> None:
    """Log the notes of a corpus at the start of a run."""
    for line in note_lines(meta, path):
        LOG.info(line)


def control_token_note(texts: Sequence[str], tokenizer: Tokenizer) -> str:
    """Return a note if most of these texts spell a control token, as rendered conversations do."""
    controls = [token for token in tokenizer.special_tokens if _is_split(token, tokenizer)]
    spelled = [min(found) for text in texts if (found := _places(controls, text))]
    if 2 * len(spelled) <= len(texts):
        return ""
    (_, token), count = spelled[0], len(spelled)
    return (
        f"{count} of the first {len(texts)} texts spell a control token, such as {token}. In a text, prompt "
        "or completion it is read as plain letters. Give conversations as `messages`, which the chat "
        "template renders, or rendered text as `segments`; mkd adds EOS to texts and completions "
        "(--append-eod)"
    )


def rendered_message_note(conversations: Sequence[Conversation], tokenizer: Tokenizer) -> str:
    """Return a note if most conversations spell control tokens that the chat template writes around them."""
    try:
        around = tokenizer.render(Conversation(PROBE)) if conversations else ""
    except DataError:
        return ""
    controls = [token for token in tokenizer.special_tokens if token in around and token.strip()]
    texts = ["".join(text for one in chat.messages for text in texts_of(one)) for chat in conversations]
    spelled = [min(found) for text in texts if (found := _places(controls, text))]
    if 2 * len(spelled) <= len(texts):
        return ""
    return (
        f"messages of {len(spelled)} of the first {len(texts)} conversations spell {spelled[0][1]}, which "
        "the chat template writes too, so that it comes twice. Remove it from the messages"
    )


def _places(tokens: Sequence[str], text: str) -> list[tuple[int, str]]:
    """Return (first place in the text, token) of the tokens that it spells."""
    return [(place, token) for token in tokens if (place := text.find(token)) >= 0]


def _is_split(token: str, tokenizer: Tokenizer) -> bool:
    """Return True if a text that spells the control token does not become it."""
    return tokenizer.encode_continuation(token) != [tokenizer.vocabulary[token]]


def _records(path: str) -> Iterator[Record]:
    """Yield the first records of a file that can be read."""
    for _, row in islice(read_rows(path), LOOKED_AT):
        with suppress(DataError):
            yield parse_row(row)


def _letters(record: Record) -> str | None:
    """Return the texts of a record that are read as plain letters, joined; None if it has none."""
    texts = [value for value in record.values if isinstance(value, str)]
    return "".join(texts) if texts else None
