"""A raw record checked and brought into the form of its kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mkd.data.records.conversations import ConversationReader
from mkd.data.records.format_hints import PAIR_HINT, format_hint
from mkd.data.records.given_loss import other_segment_keys
from mkd.data.records.kinds import (
    FORMS,
    GIVEN_LOSS,
    KINDS,
    MESSAGES,
    PAIR,
    SEGMENTS,
    TEXT,
    TOKENS,
    Record,
    unknown_keys,
)
from mkd.data.records.loss_flags import MASKED_ROLES, are_masked_roles, refuse_masks_of_turns
from mkd.data.records.messages import num_characters
from mkd.data.records.refused_keys import refuse_unsupported
from mkd.data.records.rows import Row, from_utf8, raw_fields
from mkd.data.records.tool_calls import DOCUMENTS, are_documents
from mkd.data.records.values import check_string
from mkd.data.records.wanted import ANY_RECORDS, WantedRecords
from mkd.data.records.written_keys import GENERATED
from mkd.errors import DataError
from mkd.tokenizers.chat_input import Conversation

MAX_CHARACTERS = 1_000_000  # in one document; tokenizers need up to 200 bytes of memory per character


def parse_row(row: Row, wanted: WantedRecords = ANY_RECORDS) -> Record:
    """Return the record in a raw row, with the `wanted` numbers and tag.

    A text may have any length; see `encoding.cut_texts`. Raises DataError for anything else; the caller adds
    file and line to it.
    """
    fields = raw_fields(row)
    named = _named(fields)
    if len(named) != 1:
        raise _wrong_keys(fields, named)
    kind = KINDS[named[0]]
    given = [from_utf8(fields[key]) if isinstance(fields[key], bytes) else fields[key] for key in kind.keys]
    is_chat = kind.form == MESSAGES or any(isinstance(value, list) for value in given) and kind.optional
    keys = (*kind.keys, *(kind.optional if is_chat else ()), *wanted.keys)
    _check_images(fields, kind.keys, keys)
    refuse_unsupported(fields, keys, kind.keys, is_text=kind.form == TEXT)
    reader = ConversationReader(fields, is_table=not isinstance(row, bytes))
    form, images = kind.form, tuple[Any, ...]()
    values: tuple[Any, ...]
    if kind.form == PAIR:
        values = reader.of_pair(*kind.convert(*given))
    elif is_chat:
        read = reader.of_messages if kind.form == MESSAGES else reader.of_completion
        conversation, images = read(*kind.convert(*given))
        form, values = MESSAGES, (conversation,)
    elif kind.form in GIVEN_LOSS:
        values = kind.convert(*given)
    else:
        for key, value in zip(kind.keys, given, strict=True):
            check_string(value, key)
        values = kind.convert(*given)
    if form != TEXT:
        check_size(form, values)
    conversations = [value for value in values if isinstance(value, Conversation)]
    if conversations:
        refuse_masks_of_turns(fields, keys, max(len(one.messages) for one in conversations))
    all_read = {*keys, GENERATED} - ({DOCUMENTS} if not are_documents(fields.get(DOCUMENTS)) else set())
    if conversations and are_masked_roles(fields.get(MASKED_ROLES)):
        all_read.add(MASKED_ROLES)
    ignored = tuple(key for key, value in fields.items() if value is not None and key not in all_read)
    ignored += tuple(other_segment_keys(given)) if form == SEGMENTS else ()
    tag, numbers = wanted.read_tag(fields), wanted.read_numbers(fields)
    context = {key: fields[key] for key in wanted.context if fields.get(key) is not None}
    return Record(form, values, images, ignored, numbers, tag, context)


def _named(fields: Mapping[str, Any]) -> list[str]:
    """Return the kinds whose keys the record has.

    Those whose loss is given count only if there are no others: if some values fit, these, and of two masks
    both together.
    """
    named = [name for name, kind in KINDS.items() if all(fields.get(key) is not None for key in kind.keys)]
    others = [name for name in named if KINDS[name].form not in GIVEN_LOSS]
    if others:
        return others
    named = [name for name in named if KINDS[name].fits(fields[KINDS[name].keys[0]])] or named
    keys = {name: set(KINDS[name].keys) for name in named}
    return [name for name in named if not any(keys[name] < more for more in keys.values())]


def _check_images(fields: Mapping[str, Any], keys: Sequence[str], used: Sequence[str]) -> None:
    if fields.get("images") and "images" not in used:
        raise DataError(
            f"the record has images beside {' and '.join(keys)}",
            "only a conversation says where an image stands",
            'give {"messages": ...} with image parts, or remove images',
            code="record-images-not-valid",
        )


def _wrong_keys(fields: Mapping, kinds: list[str]) -> DataError:
    if kinds:
        whole_answers = "pair" in kinds and isinstance(fields["chosen"], list)
        return DataError(
            f"the record is {' and '.join(kinds)} at once",
            "it is not clear which of them is the document",
            f"keep the keys of one of {FORMS}"
            + (f"; for pairs whose answers hold the prompt too, {PAIR_HINT}" if whole_answers else ""),
            code="record-ambiguous",
        )
    nulls = [key for kind in KINDS.values() for key in kind.keys if key in fields and fields[key] is None]
    if nulls:
        return DataError(
            f"{nulls[0]} is null",
            "there is nothing to train on",
            "remove the record, or give it a value",
            code="record-field-not-text",
        )
    absent = {kind: [key for key in kind.keys if key not in fields] for kind in KINDS.values()}
    nearest = max(absent, key=lambda kind: (len(kind.keys) - len(absent[kind]), -len(absent[kind])))
    missing = absent[nearest]
    if len(missing) < len(nearest.keys):
        given = " and ".join(key for key in nearest.keys if key in fields)
        return DataError(
            f"the record has {given}, but no {' and '.join(missing)}",
            f"a record has the keys {FORMS}",
            format_hint(fields) or "add what is missing, or remove the record",
            code="record-incomplete",
        )
    return unknown_keys("keys", fields)


_NAMES = {MESSAGES: "a conversation", PAIR: "a pair of answers", SEGMENTS: "segments", TOKENS: "tokens"}


def check_size(kind: str, values: tuple[Any, ...]) -> None:
    """Raise DataError if texts or conversations have too many characters, or tokens too many ids."""
    if kind == TOKENS:
        size = len(values[0][0])
    elif kind == SEGMENTS:
        size = sum(len(text) for text, _ in values[0])
    else:
        size = sum(len(one) if isinstance(one, str) else num_characters(one.messages) for one in values)
    if size > MAX_CHARACTERS:
        units = "ids" if kind == TOKENS else "characters"
        raise DataError(
            f"{_NAMES.get(kind, 'a prompt and completion')} of {size} {units}, more than {MAX_CHARACTERS}",
            "a longer text is cut, but the rest of an answer would lose its question",
            "split it into records that make sense alone, or remove it",
            code="record-too-long",
        )
