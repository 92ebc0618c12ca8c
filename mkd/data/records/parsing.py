"""A raw record checked and brought into the form of its kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mkd.data.records.kinds import FORMS, KINDS, MESSAGES, PAIR, TEXT, Record, unknown_keys
from mkd.data.records.messages import check_string, num_characters, split_images
from mkd.data.records.rows import Row, from_utf8, raw_fields
from mkd.errors import DataError
from mkd.tokenizers.chat_input import Conversation

MAX_CHARACTERS = 1_000_000  # in one document; tokenizers need up to 200 bytes of memory per character


def parse_row(row: Row) -> Record:
    """Return the record in a raw row.

    A text may have any length; see `encoding.cut_texts`. Raises DataError for anything else; the caller adds
    file and line to it.
    """
    fields = raw_fields(row)
    named = [name for name, kind in KINDS.items() if all(fields.get(key) is not None for key in kind.keys)]
    if len(named) != 1:
        raise _wrong_keys(fields, named)
    kind = KINDS[named[0]]
    if kind.images is None and fields.get("images"):
        raise DataError(
            f"the record has images beside {' and '.join(kind.keys)}",
            "only a conversation says where an image stands",
            'give {"messages": ...} with image parts, or remove images',
            code="record-images-without-messages",
        )
    given = [from_utf8(fields[key]) if isinstance(fields[key], bytes) else fields[key] for key in kind.keys]
    if kind.form not in (MESSAGES, PAIR):  # these check their values
        for key, value in zip(kind.keys, given, strict=True):
            check_string(value, key)
    values = kind.convert(*given)
    images: tuple[Any, ...] = ()
    if kind.form == MESSAGES:
        messages, images = split_images(values[0], fields.get(kind.images) if kind.images else None)
        values = (Conversation(messages),)
    if kind.form != TEXT:
        _check_size(kind.form, values)
    return Record(kind.form, values, images)


def _wrong_keys(fields: Mapping, kinds: list[str]) -> DataError:
    if kinds:
        return DataError(
            f"the record is {' and '.join(kinds)} at once",
            "it is not clear which of them is the document",
            f"keep the keys of one of {FORMS}",
            code="record-ambiguous",
        )
    nulls = [key for kind in KINDS.values() for key in kind.keys if key in fields and fields[key] is None]
    if nulls:
        return DataError(
            f"{nulls[0]} is null",
            "there is nothing to train on",
            "remove the record, or give it a value",
            code="record-field-null",
        )
    absent = {kind: [key for key in kind.keys if key not in fields] for kind in KINDS.values()}
    nearest = max(absent, key=lambda kind: (len(kind.keys) - len(absent[kind]), -len(absent[kind])))
    missing = absent[nearest]
    if len(missing) < len(nearest.keys):
        given = " and ".join(key for key in nearest.keys if key in fields)
        return DataError(
            f"the record has {given}, but no {' and '.join(missing)}",
            f"a record has the keys {FORMS}",
            "add what is missing, or remove the record",
            code="record-incomplete",
        )
    return unknown_keys("keys", fields)


_NAMES = {MESSAGES: "a conversation", PAIR: "a pair of answers"}


def _check_size(kind: str, values: tuple) -> None:
    size = sum(len(one) if isinstance(one, str) else num_characters(one.messages) for one in values)
    if size > MAX_CHARACTERS:
        raise DataError(
            f"{_NAMES.get(kind, 'a prompt and completion')} of {size} characters, more than {MAX_CHARACTERS}",
            "a longer text is cut, but the rest of an answer would lose its question",
            "split it into records that make sense alone, or remove it",
            code="record-too-long",
        )
