"""Raw files to encoded chunks, in order, with as many worker processes as wanted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from mkd.data.documents import Document, Row, encode_record, parse_row, read_rows
from mkd.errors import DataError, MkdError
from mkd.tokenizers.tokenizer import Tokenizer

ROWS_PER_CHUNK = 64  # small enough that a file of long documents keeps several workers busy


@dataclass(frozen=True)
class EncodedChunk:
    """The documents of consecutive rows of one file, one after the other, and what is wrong with the other rows."""

    ids: np.ndarray  # [t] int32
    loss: np.ndarray  # [t] uint8
    lengths: np.ndarray  # [documents] int64, tokens of each
    errors: list[MkdError]


def encode_files(paths: Sequence[str], tokenizer: Tokenizer, append_eod: bool, workers: int = 0) -> Iterator[EncodedChunk]:
    """Encoded chunks of all files, in the order of files and rows, whatever `workers` (processes; 0: this one) is.

    Malformed rows are reported in the chunks, an unreadable file as one error of its own chunk.
    """
    chunks = DataLoader(
        _Chunks(paths, tokenizer, append_eod),
        batch_size=None,
        num_workers=workers,
        collate_fn=_unchanged,
        # Not fork: the process may hold a GPU, and the tokenizers library threads, that do not survive it.
        multiprocessing_context="spawn" if workers else None,
        generator=torch.Generator(),  # a private one: the loader would draw from the global generator
    )
    yield from chunks


class _Chunks(IterableDataset):
    """Worker w of n encodes chunks w, w+n, ...; the loader asks the workers in turn, which restores the order."""

    def __init__(self, paths: Sequence[str], tokenizer: Tokenizer, append_eod: bool):
        self._paths, self._tokenizer, self._append_eod = paths, tokenizer, append_eod

    def __iter__(self) -> Iterator[EncodedChunk]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for rows in islice(self._row_chunks(), first, None, step):
            if isinstance(rows, MkdError):
                yield _chunk([], [rows])
            else:
                yield encode_rows(*rows, self._tokenizer, self._append_eod)

    def _row_chunks(self) -> Iterator[tuple[str, list[tuple[int, Row]]] | MkdError]:
        for path in self._paths:
            rows = read_rows(path)
            try:
                while chunk := list(islice(rows, ROWS_PER_CHUNK)):
                    yield path, chunk
            except MkdError as error:
                yield error


def encode_rows(path: str, rows: Iterable[tuple[int, Row]], tokenizer: Tokenizer, append_eod: bool) -> EncodedChunk:
    """Documents of `rows` (number, raw record) of the file `path`; errors name the file and the row."""
    documents, errors = [], []
    for number, row in rows:
        try:
            documents.append(encode_record(parse_row(row), tokenizer, append_eod))
        except DataError as error:
            errors.append(DataError(f"{path}:{number}: {error.what}", error.why, error.do))
    return _chunk(documents, errors)


def _chunk(documents: Sequence[Document], errors: list[MkdError]) -> EncodedChunk:
    parts = [*documents, Document(np.empty(0, np.int32), np.empty(0, np.uint8))]  # concatenate wants at least one
    lengths = np.array([len(document.ids) for document in documents], dtype=np.int64)
    return EncodedChunk(
        np.concatenate([part.ids for part in parts]), np.concatenate([part.loss for part in parts]), lengths, errors
    )


def _unchanged(value):
    return value
