"""Estimate how much text there is from the size and the beginning of each file, without a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkd.config.data_files import TABLE_SUFFIXES, TEXT_SUFFIX, is_raw, parse_blend, records_suffix
from mkd.data.files.named_files import named_files
from mkd.data.files.opened import opened, text_bytes
from mkd.data.files.tables import open_table
from mkd.errors import DataError

BYTES_OF_TOKEN = 4.0
"""UTF-8 bytes of a token of English text and of code, with vocabularies of 32,000 to 150,000."""
READ_BYTES = 4 << 20  # of each file, for the lengths of documents
MOST_READ = 16  # files of a folder, a pattern or a data set
LONG = 0.95  # proportion of documents that are not longer than `Survey.long_document`
INDEX_CODES = {4: 4, 8: 2}  # Megatron's dtype code of a .idx file -> bytes of a token

Estimate = tuple[float, float, list[float]]
"""Tokens, documents, and tokens of the first documents."""


@dataclass(frozen=True)
class Survey:
    """Estimates of all text together."""

    tokens: int
    documents: int
    long_document: int  # tokens, at the share LONG of documents

    def describe(self) -> str:
        """Return the estimate as a phrase."""
        return (
            f"about {self.tokens:,} tokens in {self.documents:,} documents, 95 % of them of at most "
            f"{self.long_document:,} tokens ({BYTES_OF_TOKEN:g} bytes a token)"
        )


def survey(data: tuple[str, ...]) -> Survey:
    """Estimate the text of `data`, which is as --data-path."""
    tokens, documents, lengths = 0.0, 0.0, list[float]()
    for path in parse_blend(data).paths:
        for of_file in _of_path(path):
            tokens, documents, lengths = tokens + of_file[0], documents + of_file[1], lengths + of_file[2]
    lengths.sort()
    long_document = lengths[min(len(lengths) - 1, int(LONG * len(lengths)))] if lengths else 1.0
    return Survey(max(1, round(tokens)), max(1, round(documents)), max(1, round(long_document)))


def _of_path(path: str) -> Iterator[Estimate]:
    """Yield the estimates of the files of `path`. Of many files, some are read, and count for the others."""
    if not is_raw(path):
        yield _corpus(Path(f"{path}.idx"), Path(f"{path}.bin"))
        return
    files = named_files(path, "data")
    read = files.at_hand()[:: max(1, len(files.names) // MOST_READ)][:MOST_READ]
    factor = files.growth(read) if len(read) < len(files.names) else 1.0
    for file in map(Path, read):
        of_file = _table(file) if file.suffix in TABLE_SUFFIXES else _lines(file)
        yield factor * of_file[0], factor * of_file[1], of_file[2]


def _lines(path: Path) -> Estimate:
    """Return the estimate of a file with a record in each line, which may be compressed."""
    with opened(path) as file:
        head = file.readlines(READ_BYTES)
        is_whole = not file.read(1)
    lengths = [sum(_text_bytes(line, records_suffix(path))) / BYTES_OF_TOKEN for line in head]
    lengths = [length for length in lengths if length]
    scale = 1.0 if is_whole else text_bytes([path]) / max(1, sum(map(len, head)))
    return scale * sum(lengths), scale * len(lengths), lengths


def _text_bytes(line: bytes, suffix: str) -> Iterator[int]:
    """Yield the bytes of each text of a record; the record as a whole if it cannot be read."""
    if suffix == TEXT_SUFFIX:
        yield len(line.strip())
        return
    try:
        yield from _strings(json.loads(line))
    except ValueError:  # the run names it
        yield len(line)


def _strings(value: Any) -> Iterator[int]:
    if isinstance(value, str) and not value.startswith("data:"):  # that is an image
        yield len(value.encode("utf-8", "replace"))
    elif isinstance(value, (dict, list)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _strings(one)


def _table(path: Path) -> Estimate:
    """Return the estimate of a table: if it cannot be read, from its size alone."""
    try:
        with open_table(path) as table:
            num_bytes, rows = table.num_bytes, table.num_rows
    except (DataError, OSError):  # the run names what is wrong with it
        num_bytes, rows = path.stat().st_size, path.stat().st_size // 2000
    tokens = num_bytes / BYTES_OF_TOKEN
    return tokens, rows, [tokens / max(1, rows)]


def _corpus(index: Path, tokens: Path) -> Estimate:
    """Return the numbers of a tokenised corpus: they follow from its files."""
    with open(index, "rb") as file:
        header = file.read(34)  # MMIDIDX, two zero bytes, version, dtype code, sequences, documents
    size = INDEX_CODES.get(header[17] if len(header) == 34 else 0, 4)
    number = tokens.stat().st_size / size if tokens.is_file() else 0
    documents = int.from_bytes(header[18:26], "little")
    return number, documents, [number / max(1, documents)]
