"""The records of raw files, and the document (ids and loss mask) that each becomes."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mkd.data.images.conversation import ConversationImages, EncodedImage
from mkd.data.messages import check_string, json_name, num_characters, pair_of_answers, split_images
from mkd.errors import DataError
from mkd.tokenizers.chat_input import Conversation
from mkd.tokenizers.tokenizer import Tokenizer

JSON_SUFFIXES = (".jsonl", ".json")
ARROW_SUFFIXES = (".parquet", ".arrow")
TEXT_SUFFIX = ".txt"
RAW_SUFFIXES = (*JSON_SUFFIXES, *ARROW_SUFFIXES, TEXT_SUFFIX)
MAX_CHARACTERS = 1_000_000  # in one document; tokenizers need up to 200 bytes of memory per character
TABLE_ROWS_PER_READ = 256  # rows of a parquet or arrow file held in memory at a time

Row = bytes | Mapping | DataError
"""A raw record, or the reason why a row has no values.

A record is a line of JSON, a row of a table, or {"text": bytes} for a line of text.
"""

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


@dataclass(frozen=True)
class Document:
    """The tokens of one record; `loss[i] == 1` means that token i counts as a label (predicted at i-1)."""

    ids: np.ndarray  # [n] int32
    loss: np.ndarray  # [n] uint8
    kind: str  # form of its record
    images: tuple[EncodedImage, ...] = ()


def read_rows(path: str | Path, keep_blank: bool = False, whole: bool = False) -> Iterator[tuple[int, Row]]:
    """Yield (line or row number from 1, raw record) for every record of a file.

    Skip blank lines; keep those of a `.txt` file if `keep_blank`. Of a table, only the columns of
    documents are read, unless it is read `whole`. Raises DataError if the file cannot be read.
    """
    path = Path(path)
    if path.suffix not in RAW_SUFFIXES:
        raise DataError(
            f"{path}: {path.suffix or 'a name without a suffix'} is not a known kind of file",
            do=f"use one of {', '.join(RAW_SUFFIXES)}",
            code="data-file-kind-unknown",
        )
    try:
        if path.suffix in JSON_SUFFIXES:
            yield from _lines(path)
        elif path.suffix == TEXT_SUFFIX:
            yield from ((number, {"text": line}) for number, line in _lines(path, b"\r\n", keep_blank))
        else:
            yield from enumerate(_table_rows(path, whole), 1)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read",
            str(error),
            "check the path and its permissions",
            code="data-file-unreadable",
        ) from error


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
    given = [_utf8(fields[key]) if isinstance(fields[key], bytes) else fields[key] for key in kind.keys]
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


def encode_record(
    record: Record, tokenizer: Tokenizer, append_eod: bool, images: ConversationImages | None = None
) -> Document:
    """Return the tokens and loss mask of a record, and its images, which only the reader `images` can read.

    If `append_eod`, texts and completions end with the EOS token. Text: loss everywhere. Messages: the chat
    template's ids, loss on assistant turns. Prompt and completion: loss on the completion and its EOS; only
    the prompt has the tokenizer's BOS.
    """
    if record.kind == MESSAGES:
        if images is None and record.images:
            raise _no_image_reader()
        if images is not None:
            ids, loss, placed = images.encode(record.values[0], record.images)
            return Document(ids, loss, record.kind, placed)
        ids, loss = tokenizer.apply_chat_template(record.values[0])
    else:
        ids = tokenizer.encode(record.values[0])
        if len(ids) > 1 and ids[-1] == tokenizer.eos_id:
            ids = ids[:-1]  # drop the EOS that the tokenizer's configuration adds: append_eod alone decides
        num_prompt = 0
        if record.kind == PROMPT_COMPLETION:
            num_prompt = len(ids)
            ids = ids + tokenizer.encode_continuation(record.values[1])
        if append_eod:
            ids = [*ids, require_eos(tokenizer)]
        loss = [0] * num_prompt + [1] * (len(ids) - num_prompt)
    return Document(np.asarray(ids, dtype=np.int32), np.asarray(loss, dtype=np.uint8), record.kind)


def _lines(
    path: Path, stripped: bytes | None = None, keep_blank: bool = False
) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line), with the bytes `stripped` removed at both ends (None: white space)."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            content = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip(stripped)
            if keep_blank or content.strip():
                yield number, content


def _table_rows(path: Path, whole: bool) -> Iterator[Row]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(
            f"{path} needs pyarrow, which is not installed", do="pip install pyarrow", code="pyarrow-missing"
        ) from error
    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                columns = None if whole else _known_columns(file.schema_arrow.names, path)
                for batch in file.iter_batches(TABLE_ROWS_PER_READ, columns=columns):
                    yield from _batch_rows(batch)
        else:
            with pa.memory_map(str(path)) as source:
                for batch in _arrow_batches(pa, source):
                    batch = batch if whole else batch.select(_known_columns(batch.schema.names, path))
                    for start in range(0, batch.num_rows, TABLE_ROWS_PER_READ):
                        yield from _batch_rows(batch.slice(start, TABLE_ROWS_PER_READ))
    except pa.ArrowException as error:
        raise DataError(
            f"{path} is not a valid {path.suffix[1:]} file",
            str(error),
            "check that it was written completely",
            code="data-file-not-valid",
        ) from error


def _arrow_batches(pa, source) -> Iterator:
    """Yield the record batches of an IPC file, or of an IPC stream, which Hugging Face datasets writes."""
    try:
        reader = pa.ipc.open_file(source)
    except pa.ArrowInvalid:
        source.seek(0)
        yield from pa.ipc.open_stream(source)
    else:
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))


def _batch_rows(batch) -> Iterator[Row]:
    """Yield the rows of a record batch.

    A row whose string column holds invalid UTF-8 is yielded as a DataError.
    """
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            rows = [_not_utf8(error)]
        else:
            rows = [row for i in range(batch.num_rows) for row in _batch_rows(batch.slice(i, 1))]
    yield from rows


def _known_columns(names: list[str], path: Path) -> list[str]:
    complete = [kind for kind in KINDS.values() if set(kind.keys) <= set(names)]
    wanted = {key for kind in KINDS.values() for key in kind.keys} | {kind.images for kind in complete}
    known = [name for name in names if name in wanted]
    if not complete:
        raise _unknown("columns", names, f"{path} has ")
    twice = next((name for name in known if known.count(name) > 1), None)
    if twice is not None:
        raise DataError(
            f"{path} has two columns {twice}",
            "it is not clear which of them is meant",
            "rename or drop one",
            code="column-twice",
        )
    return known


def raw_fields(row: Row) -> Mapping:
    """Return the keys and values of a raw record. Raises DataError if it has none."""
    if isinstance(row, DataError):
        raise row
    if not isinstance(row, bytes):
        return row
    text = _utf8(row)
    try:
        value = JSON.decode(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"not valid JSON: {error}",
            "every line must be one complete JSON object",
            "repair or remove the line; a file that is one JSON array becomes lines with: jq -c '.[]'",
            code="record-not-json",
        ) from error
    if not isinstance(value, dict):
        raise DataError(
            f"a JSON {json_name(value)}, not an object",
            "every line must be one JSON object",
            "a file that is one JSON array becomes lines with: jq -c '.[]'",
            code="record-not-object",
        )
    return value


def _utf8(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(error) from error


def _not_utf8(error: UnicodeDecodeError) -> DataError:
    return DataError(
        f"not UTF-8: {error.reason} at byte {error.start + 1}",
        "the text would be changed silently",
        "convert the file with: iconv -t UTF-8",
        code="record-not-utf8",
    )


def _unique_keys(pairs: list[tuple[str, object]]) -> dict:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return fields


def _no_constant(name: str):
    raise ValueError(f"{name} is not a JSON number")


JSON = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_no_constant)
"""Refuses what Python's default decoder accepts and other readers do not: repeated keys, NaN and Infinity."""


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
    return _unknown("keys", fields)


def _unknown(keys: str, found: Iterable[str], where: str = "") -> DataError:
    """Return the error for keys of a record, or columns of a table, that do not make a document."""
    shown = ", ".join(islice(map(repr, found), 8)) or "none"
    why = f"a record has the keys {FORMS}"
    return DataError(
        f"{where}no known {keys} (found: {shown})",
        why,
        f"rename the {keys} of the file",
        code="record-without-known-keys",
    )


def _no_image_reader() -> DataError:
    return DataError(
        "the conversation has images, and nothing here can read them",
        "student or teacher has no preprocessor_config.json of a supported vision-language model, and reads "
        "text alone",
        "use vision-language models, or remove the records with images",
        code="images-without-processor",
    )


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


def require_eos(tokenizer: Tokenizer) -> int:
    """Return the id that ends documents. Raises DataError if the tokenizer has none."""
    if tokenizer.eos_id is None:
        raise DataError(
            "the tokenizer has no end-of-sequence token",
            "--append-eod ends every document with it",
            "use --no-append-eod, or set eos_token in tokenizer_config.json",
            code="tokenizer-without-eos",
        )
    return tokenizer.eos_id
