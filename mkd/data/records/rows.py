"""The raw records of files: lines of JSON or text, and rows of tables."""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mkd.config.data_files import JSON_SUFFIXES, KNOWN_FILES, TABLE_SUFFIXES, TEXT_SUFFIX, records_suffix
from mkd.data.files.opened import opened
from mkd.data.files.tables import open_table
from mkd.data.records.kinds import KINDS, TEXT, unknown_keys
from mkd.data.records.loss_flags import MASKED_ROLES
from mkd.data.records.refused_keys import REFUSED_KEYS
from mkd.data.records.values import json_name
from mkd.errors import DataError
from mkd.file_start import content_of_file

Row = bytes | Mapping | DataError
"""A raw record, or the reason why a row has no values.

A record is a line of JSON, a row of a table, or {"text": bytes} for a line of text.
"""


def read_rows(
    path: str | Path, whole: bool = False, numbers: Sequence[str] = ()
) -> Iterator[tuple[int, Row]]:
    """Yield (line or row number from 1, raw record) for every record of a file, which may be compressed.

    Skip blank lines. Of a table, only the columns of documents and `numbers` are read, unless it is read
    `whole`. Raises DataError if the file cannot be read.
    """
    path = Path(path)
    suffix = records_suffix(path)
    if not suffix:
        raise DataError(
            f"{path}: {path.suffix or 'a name without a suffix'} is not a known kind of file",
            do=f"use one of {KNOWN_FILES}",
            code="data-file-kind-unknown",
        )
    refuse_other_content(path, suffix)
    try:
        if suffix in JSON_SUFFIXES:
            yield from _lines(path)
        elif suffix == TEXT_SUFFIX:
            yield from ((number, {"text": line}) for number, line in _lines(path, b"\r\n"))
        else:
            yield from enumerate(_table_rows(path, whole, numbers), 1)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read",
            str(error),
            "check the path and its permissions",
            code="data-file-unreadable",
        ) from error


def refuse_other_content(path: Path, suffix: str) -> None:
    """Raise DataError if the first bytes show that the file is not what its name says."""
    content = content_of_file(path)
    expected = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix, suffix.removeprefix("."))
    if content is None or content.kind == expected or (content.kind == "page" and suffix == TEXT_SUFFIX):
        return
    raise DataError(
        f"{path} is {content.what}", "its name says how it is read", content.do, code="data-file-unreadable"
    )


def raw_fields(row: Row) -> Mapping:
    """Return the keys and values of a raw record. Raises DataError if it has none."""
    if isinstance(row, DataError):
        raise row
    if not isinstance(row, bytes):
        return row
    text = from_utf8(row)
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
            code="record-not-json",
        )
    return value


def _lines(path: Path, stripped: bytes | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line), with the bytes `stripped` removed at both ends (None: white space)."""
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            content = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip(stripped)
            if content.strip():
                yield number, content


def unread_columns(path: str | Path, numbers: Sequence[str] = ()) -> Counter[str]:
    """Return the columns of a table that `read_rows` leaves out, with how many rows have a value there.

    `numbers` are read. Of nested columns of a parquet file, rows without a value are counted too. Other
    files have no columns.
    """
    path = Path(path)
    if path.suffix not in TABLE_SUFFIXES:
        return Counter()
    with open_table(path) as table:
        left_out = set(table.names) - set(_known_columns(table.names, path, numbers))
        return +table.num_values(left_out)


def _table_rows(path: Path, whole: bool, numbers: Sequence[str]) -> Iterator[Row]:
    with open_table(path) as table:
        columns = None if whole else _known_columns(table.names, path, numbers)
        for batch in table.batches(columns):
            yield from _batch_rows(batch)


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


def _known_columns(names: list[str], path: Path, numbers: Sequence[str]) -> list[str]:
    complete = [kind for kind in KINDS.values() if set(kind.keys) <= set(names)]
    wanted = {*numbers, *(key for kind in KINDS.values() for key in kind.keys)}
    wanted |= {key for kind in complete for key in kind.optional}
    wanted |= set() if all(kind.form == TEXT for kind in complete) else {*REFUSED_KEYS, MASKED_ROLES}
    known = [name for name in names if name in wanted]
    if not complete:
        raise unknown_keys("columns", names, f"{path} has ")
    twice = next((name for name in known if known.count(name) > 1), None)
    if twice is not None:
        raise DataError(
            f"{path} has two columns {twice}",
            "it is not clear which of them is meant",
            "rename or drop one",
            code="record-ambiguous",
        )
    return known


def from_utf8(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(error) from error


def _not_utf8(error: UnicodeDecodeError) -> DataError:
    return DataError(
        f"not UTF-8: {error.reason} at byte {error.start + 1}",
        "the text would be changed silently",
        "convert the file with: iconv -t UTF-8",
        code="record-not-json",
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
