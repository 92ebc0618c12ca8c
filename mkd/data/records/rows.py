"""The raw records of files: lines of JSON or text, and rows of tables."""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mkd.config.data_files import ARROW_SUFFIXES, JSON_SUFFIXES, KNOWN_FILES, TEXT_SUFFIX, records_suffix
from mkd.data.files.opened import opened
from mkd.data.records.kinds import KINDS, TEXT, unknown_keys
from mkd.data.records.refused_keys import REFUSED_KEYS
from mkd.data.records.values import json_name
from mkd.errors import DataError

TABLE_ROWS_PER_READ = 256  # rows of a parquet or arrow file held in memory at a time

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


def _table_rows(path: Path, whole: bool, numbers: Sequence[str]) -> Iterator[Row]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(
            f"{path} needs pyarrow, which is not installed",
            do="pip install pyarrow",
            code="data-package-missing",
        ) from error
    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                names = file.schema_arrow.names
                columns = None if whole else _known_columns(names, path, numbers)
                for batch in file.iter_batches(TABLE_ROWS_PER_READ, columns=columns):
                    yield from _batch_rows(batch)
        else:
            with pa.memory_map(str(path)) as source:
                for batch in _arrow_batches(pa, source):
                    if not whole:
                        batch = batch.select(_known_columns(batch.schema.names, path, numbers))
                    for start in range(0, batch.num_rows, TABLE_ROWS_PER_READ):
                        yield from _batch_rows(batch.slice(start, TABLE_ROWS_PER_READ))
    except pa.ArrowException as error:
        raise DataError(
            f"{path} is not a valid {path.suffix[1:]} file",
            str(error),
            "check that it was written completely",
            code="data-file-unreadable",
        ) from error


def unread_columns(path: str | Path, numbers: Sequence[str] = ()) -> Counter[str]:
    """Return the columns of a table that `read_rows` leaves out, with how many rows have a value there.

    `numbers` are read. Of nested columns of a parquet file, rows without a value are counted too. Other
    files have no columns.
    """
    path, counts = Path(path), Counter[str]()
    if path.suffix not in ARROW_SUFFIXES:
        return counts
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            left_out = set(names) - set(_known_columns(names, path, numbers))
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            counts.update({name: sum(_num_values(group, name) for group in groups) for name in left_out})
    else:
        with pa.memory_map(str(path)) as source:
            for batch in _arrow_batches(pa, source):
                known = _known_columns(batch.schema.names, path, numbers)
                for name, column in zip(batch.schema.names, batch.columns, strict=True):
                    counts[name] += (name not in known) * (len(column) - column.null_count)
    return +counts


def num_table_rows(path: str | Path) -> int:
    """Return the rows of a table; 0 if it cannot be read, which `read_rows` reports."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if Path(path).suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                return file.metadata.num_rows
        with pa.memory_map(str(path)) as source:
            return sum(batch.num_rows for batch in _arrow_batches(pa, source))
    except (ImportError, OSError, ValueError):  # pyarrow's errors are among the last two
        return 0


def _num_values(group: Any, name: str) -> int:
    """Return the rows of a parquet row group that have a value in a column."""
    chunks = (group.column(i) for i in range(group.num_columns))
    statistics = next((chunk.statistics for chunk in chunks if chunk.path_in_schema == name), None)
    return group.num_rows - (statistics.null_count or 0 if statistics is not None else 0)


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


def _known_columns(names: list[str], path: Path, numbers: Sequence[str]) -> list[str]:
    complete = [kind for kind in KINDS.values() if set(kind.keys) <= set(names)]
    wanted = {*numbers, *(key for kind in KINDS.values() for key in kind.keys)}
    wanted |= {key for kind in complete for key in kind.optional}
    wanted |= set() if all(kind.form == TEXT for kind in complete) else set(REFUSED_KEYS)
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
