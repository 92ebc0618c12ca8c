"""Encode raw files as documents, in order, in worker processes.

Huge texts are cut before they are tokenised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from mkd.data.corpus.documents import Document, encode_documents
from mkd.data.images.conversation import ConversationImages
from mkd.data.images.image_table import image_records
from mkd.data.progress_lines import Position
from mkd.data.quarantine import BadRecord
from mkd.data.records.ignored_keys import IgnoredKeys, count_without_loss, ignored_keys
from mkd.data.records.kinds import TEXT, Record
from mkd.data.records.parsing import MAX_CHARACTERS, parse_row
from mkd.data.records.rows import Row, read_rows
from mkd.data.records.wanted import ANY_RECORDS, WantedRecords
from mkd.data.workers import iterating, outlive_signals
from mkd.errors import DataError, MkdError
from mkd.tokenizers.tokenizer import Tokenizer

RECORDS_PER_BATCH = 64  # small enough that a file of long documents keeps several workers busy
WORKER_BYTES = 64 << 20  # least bytes per worker: 20 s of work, while starting a worker takes up to 10 s
T = TypeVar("T")


@dataclass(frozen=True)
class EncodedBatch:
    """Documents of consecutive rows of one file, concatenated, and the errors of the rows that make none."""

    ids: np.ndarray  # [t] int32
    loss: np.ndarray  # [t] uint8
    lengths: np.ndarray  # [documents] int64, tokens of each
    kinds: frozenset[str]  # kinds of their records
    errors: list[MkdError]  # a BadRecord for each bad row, or the error of an unreadable file
    images: np.ndarray  # [images] of IMAGE, with documents and sources counted from those of the batch
    image_sources: bytes
    lines: np.ndarray  # [documents] int64, line or row of each document's record
    numbers: np.ndarray  # [documents, keys] fp32, see `WantedRecords.numbers`
    tags: tuple[str, ...] = ()  # of each document, "" without one; (): tags are not read
    path: str = ""  # the file; "" if it cannot be read
    ignored: IgnoredKeys = field(default_factory=IgnoredKeys)
    num_rows: int = 0
    megabytes_read: float = 0.0  # of all files, up to its end


class FileBatch(NamedTuple):
    """Consecutive rows of a file."""

    path: str
    rows: list[tuple[int, Row]]
    left_out: Counter[str] = Counter()  # keys beside the texts that were cut to these rows
    megabytes_read: float = 0.0  # of all files, up to its end


@dataclass(frozen=True)
class FileRows:
    """Rows of files in batches, or the error that stopped reading a file."""

    paths: Sequence[str]
    wanted: WantedRecords = ANY_RECORDS

    def __iter__(self) -> Iterator[FileBatch | MkdError]:
        position = Position()
        for path in self.paths:
            left_out = Counter[str]()
            read = read_rows(path, numbers=self.wanted.keys)
            rows = cut_texts(position.follow(read, path), left_out, self.wanted)
            try:
                while batch := list(islice(rows, RECORDS_PER_BATCH)):
                    yield FileBatch(path, batch, left_out.copy(), position.megabytes)
                    left_out.clear()
            except MkdError as error:
                yield error


def cut_texts(
    rows: Iterable[tuple[int, Row]], left_out: Counter[str] | None = None, wanted: WantedRecords = ANY_RECORDS
) -> Iterator[tuple[int, Row]]:
    """Yield the rows, with each text of more than MAX_CHARACTERS cut into several rows.

    Each of them has the `wanted` numbers and tag of the record. Its other keys are counted in `left_out`.

    A cut is made after the last line end in the second half of what fits, else before the last blank there,
    else anywhere.
    """
    for number, row in rows:
        record = _text(row, left_out, wanted) if _size(row) > MAX_CHARACTERS else None
        if record is None:
            yield number, row
            continue
        (text,), others = record.values, dict[str, Any](zip(wanted.numbers, record.numbers, strict=True))
        if wanted.tag is not None and record.tag:
            others[wanted.tag] = record.tag
        start = 0
        while start < len(text):
            end = _cut(text, start)
            yield number, {"text": text[start:end], **others}
            start = end


def _size(row: Row) -> int:
    """Return an upper bound of the characters in the row's text."""
    if isinstance(row, bytes):
        return len(row)
    values = () if isinstance(row, DataError) else row.values()
    return max((len(value) for value in values if isinstance(value, str | bytes)), default=0)


def _cut(text: str, start: int) -> int:
    end = start + MAX_CHARACTERS
    if end >= len(text):
        return len(text)
    half = start + MAX_CHARACTERS // 2
    line_end = text.rfind("\n", half, end)
    blank = text.rfind(" ", half, end)
    return line_end + 1 if line_end >= 0 else blank if blank >= 0 else end


def _text(row: Row, left_out: Counter[str] | None, wanted: WantedRecords) -> Record | None:
    try:
        record = parse_row(row, wanted)
    except DataError:
        return None  # the encoder reports what is wrong with it
    if record.kind != TEXT:
        return None
    if left_out is not None:
        left_out.update(record.ignored)
    return record


def useful_workers(num_bytes: int, most: int) -> int:
    """Return how many processes, up to `most`, are worth starting for `num_bytes` of raw files; 0: none.

    With 0, this process does the work.
    """
    workers = min(most, num_bytes // WORKER_BYTES)
    return workers if workers > 1 else 0


def in_workers(
    source: Iterable[Any],
    function: Callable[[Any], T],
    workers: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> Generator[T, None, None]:
    """Yield `function(part)` for every part of `source`, in order, computed in `workers` processes.

    With 0 workers this process computes. Every worker iterates over the whole source and skips the parts of
    the others. So both arguments must be picklable, and iterating must be quick. `progress` is called for
    each part, and may raise.
    """
    loader = DataLoader(
        _Share(source, function),
        batch_size=None,
        num_workers=workers,
        collate_fn=_unchanged,
        # Do not fork: this process may hold a GPU and threads of tokenizers, which do not survive a fork.
        multiprocessing_context="spawn" if workers else None,
        generator=torch.Generator(),  # private, because the loader would draw from the global generator
        worker_init_fn=outlive_signals,
    )
    with iterating(loader) as results:
        try:
            for result in results:
                progress()
                yield result
        except RuntimeError:  # a signal to the group may kill a worker before it ignores signals
            progress()
            raise


class _Share(IterableDataset):
    """Parts w, w+n, ... for worker w of n; the loader asks the workers in turn, which restores the order."""

    def __init__(self, source: Iterable[Any], function: Callable[[Any], Any]):
        self._source, self._function = source, function

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from map(self._function, islice(self._source, first, None, step))


def encode_files(
    paths: Sequence[str],
    tokenizer: Tokenizer,
    append_eod: bool,
    workers: int = 0,
    progress: Callable[[], None] = lambda: None,
    images: ConversationImages | None = None,
    wanted: WantedRecords = ANY_RECORDS,
) -> Generator[EncodedBatch, None, None]:
    """Yield the encoded batches of all files, in the order of files and rows.

    They are computed in `workers` processes (0: this one); the result does not depend on their number. A
    batch lists the errors of its malformed rows; an unreadable file gives a batch with that one error. For
    `progress` see `in_workers`.
    """
    encoder = _Encoder(tokenizer, append_eod, images, wanted)
    return in_workers(FileRows(paths, wanted), encoder, workers, progress)


@dataclass(frozen=True)
class _Encoder:
    tokenizer: Tokenizer
    append_eod: bool
    images: ConversationImages | None
    wanted: WantedRecords

    def __call__(self, batch: FileBatch | MkdError) -> EncodedBatch:
        encoded, errors = each_row(batch, self._encode)
        ignored = ignored_keys([record for _, (record, _) in encoded], self.tokenizer)
        if isinstance(batch, FileBatch):
            ignored.records += batch.left_out
        ignored.without_loss = count_without_loss(
            (record, any(one.loss[1:].any() for one in of_record)) for _, (record, of_record) in encoded
        )
        documents = [document for _, (_, of_record) in encoded for document in of_record]
        lines = [line for line, (_, of_record) in encoded for _ in of_record]
        numbers = [record.numbers for _, (record, of_record) in encoded for _ in of_record]
        tags = [record.tag for _, (record, of_record) in encoded for _ in of_record]
        images, image_sources = image_records(document.images for document in documents)
        return EncodedBatch(
            ids=np.concatenate([np.empty(0, np.int32), *(document.ids for document in documents)]),
            loss=np.concatenate([np.empty(0, np.uint8), *(document.loss for document in documents)]),
            lengths=np.array([len(document.ids) for document in documents], dtype=np.int64),
            kinds=frozenset(document.kind for document in documents),
            errors=errors,
            images=images,
            image_sources=image_sources,
            lines=np.array(lines, dtype=np.int64),
            numbers=np.array(numbers, dtype=np.float32).reshape(len(lines), len(self.wanted.numbers)),
            tags=() if self.wanted.tag is None else tuple(tags),
            path=batch.path if isinstance(batch, FileBatch) else "",
            ignored=ignored,
            num_rows=len(batch.rows) if isinstance(batch, FileBatch) else 0,
            megabytes_read=batch.megabytes_read if isinstance(batch, FileBatch) else 0.0,
        )

    def _encode(self, row: Row) -> tuple[Record, list[Document]]:
        record = parse_row(row, self.wanted)
        return record, encode_documents(record, self.tokenizer, self.append_eod, self.images)


def each_row(
    batch: FileBatch | MkdError, encode: Callable[[Row], T]
) -> tuple[list[tuple[int, T]], list[MkdError]]:
    """Return ((line, `encode(row)`) for every good row of a batch, a BadRecord for every other row).

    If the batch is the error of a file, return no rows and that error. Equal consecutive rows, such as the
    parts of a long text without any word, are encoded once.
    """
    if isinstance(batch, MkdError):
        return [], [batch]
    encoded: list[tuple[int, T]] = []
    errors: list[MkdError] = []
    before = None
    for line, row in batch.rows:
        try:
            encoded.append((line, encoded[-1][1] if row == before else encode(row)))
            before = row
        except DataError as error:
            errors.append(BadRecord.from_row(batch.path, line, row, error))
    return encoded, errors


def _unchanged(value):
    return value
