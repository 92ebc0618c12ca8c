"""Notes about a file of records: keys and columns that nothing reads, texts that look like conversations."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from mkd.config.data_files import TEXT_SUFFIX, records_suffix
from mkd.data.records.ignored_keys import IgnoredKeys, reasoning_note
from mkd.data.records.parsing import parse_row
from mkd.data.records.rows import read_rows, unread_columns
from mkd.errors import DataError
from mkd.tokenizers.tokenizer import Tokenizer

LOG = logging.getLogger("mkd")
LOOKED_AT = 100  # records of a file


def file_notes(path: str, keys: IgnoredKeys, tokenizer: Tokenizer, numbers: Sequence[str] = ()) -> list[str]:
    """Return what every start of a run says about the file.

    Of its records `keys` were ignored, and `numbers` are read.
    """
    found = replace(keys, records=keys.records + unread_columns(path, numbers))
    texts = [] if records_suffix(path) == TEXT_SUFFIX else list(_texts(path))
    notes = (str(found), reasoning_note(keys.reasoning), control_token_note(texts, tokenizer))
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
    """Return a note if most of these texts begin with a control token, as rendered conversations do."""
    controls = [token for token in tokenizer.special_tokens if _is_split(token, tokenizer)]
    begun = [token for text in texts for token in controls if text.lstrip().startswith(token)]
    if 2 * len(begun) <= len(texts):
        return ""
    return (
        f"{len(begun)} of the first {len(texts)} texts begin with a control token, such as {begun[0]}. "
        "In a text, prompt or completion it is read as plain letters. Give conversations as `messages`, "
        "which the chat template renders"
    )


def _is_split(token: str, tokenizer: Tokenizer) -> bool:
    """Return True if a text that spells the control token does not become it."""
    return tokenizer.encode_continuation(token) != [tokenizer.vocabulary[token]]


def _texts(path: str) -> Iterator[str]:
    """Yield the texts among the first records of a file, and the texts that are prompts."""
    for _, row in islice(read_rows(path), LOOKED_AT):
        try:
            record = parse_row(row)
        except DataError:
            continue
        if isinstance(record.values[0], str):
            yield record.values[0]
