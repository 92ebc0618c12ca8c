"""Text on which models are measured outside a run: the beginnings of documents, as batches of one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from mkd.data.batch import Pack, PackedBatch, collate
from mkd.data.corpus.documents import Document
from mkd.data.corpus.encoding import encode_files
from mkd.data.files.named_files import all_local
from mkd.errors import DataError
from mkd.human import counted, duration
from mkd.tokenizers.tokenizer import Tokenizer

EVERY_S = 10.0  # between two lines of progress
T = TypeVar("T")
U = TypeVar("U")


class TimedBatches(list[T]):
    """Batches that say during every pass over them how far it is, and how long the rest takes at most."""

    def __init__(self, batches: Sequence[T], say: Callable[[str], None], every_s: float = EVERY_S):
        """`say` gets a line at most every `every_s` seconds."""
        super().__init__(batches)
        self._say, self._every_s = say, every_s
        self._done, self._shown = 0, time.monotonic()

    def __iter__(self) -> Iterator[T]:
        start = self._shown = time.monotonic()
        for done, batch in enumerate(super().__iter__()):
            self._done = done
            if done and self._is_time():
                left = duration((time.monotonic() - start) / done * (len(self) - done))
                self._say(f"measured {done} of {counted(len(self), 'batch')}, at most {left} left")
            yield batch

    def cuts(self, cuts: Sequence[U]) -> Iterator[U]:
        """Yield the cuts that are measured on this batch, and say how far they are: a batch may take long."""
        for done, cut in enumerate(cuts):
            if done and self._is_time():
                place = f"batch {self._done + 1} of {len(self)}"
                self._say(f"measured {done} of {counted(len(cuts), 'cut')} on {place}")
            yield cut

    def _is_time(self) -> bool:
        """Return True if a line is due, which then counts as shown."""
        now = time.monotonic()
        if now - self._shown < self._every_s:
            return False
        self._shown = now
        return True


def read_batches(
    paths: Sequence[str],
    tokenizer: Tokenizer,
    *,
    num_tokens: int,
    seq_length: int,
    batch_tokens: int,
    least: int | None = None,  # tokens that the text must have; None: one sequence
) -> list[PackedBatch]:
    """Return about `num_tokens` tokens of the files as batches of about `batch_tokens`.

    Every document gives its first `seq_length` tokens, as many documents as needed; then their following
    tokens, if the files end before. Pieces without a loss token, such as those of a long prompt, are skipped,
    so that every batch can be scored. Raises DataError for a file that cannot be read, a record that is not
    valid, and a text that is too short.
    """
    packs: list[Pack] = []
    found = 0
    for pack in _pieces(_documents(paths, tokenizer), seq_length):
        packs.append(pack)
        found += len(pack.tokens)
        if found >= num_tokens:
            break
    least = min(seq_length, num_tokens) if least is None else least
    if found < least:
        raise DataError(
            f"{', '.join(paths)}: {counted(found, 'token')} to predict, fewer than {least}",
            "models are measured by what they predict on this text",
            "give more text, or lower --seq-length",
            code="too-little-data",
        )
    return [collate(group) for group in _grouped(packs, batch_tokens)]


def _documents(paths: Sequence[str], tokenizer: Tokenizer) -> Iterator[Document]:
    files = all_local(paths, "--data-path")
    for batch in encode_files(files, tokenizer, append_eod=tokenizer.eos_id is not None):
        if batch.errors:
            raise batch.errors[0]
        ends = np.cumsum(batch.lengths)
        for start, end in zip(ends - batch.lengths, ends, strict=True):
            yield Document(batch.ids[start:end], batch.loss[start:end], "")


def _pieces(documents: Iterator[Document], seq_length: int) -> Iterator[Pack]:
    """Yield the first piece of every document, then the second one of those that have one, and so on."""
    current, offset = documents, 0
    while True:
        longer = []
        for document in current:
            piece = _pack(document, offset, seq_length)
            if piece is not None:
                yield piece
            if len(document.ids) > offset + seq_length + 1:
                longer.append(document)
        if not longer:
            return
        current, offset = iter(longer), offset + seq_length


def _pack(document: Document, offset: int, seq_length: int) -> Pack | None:
    """Return a piece as a pack without padding; None if it predicts nothing."""
    end = min(offset + seq_length, len(document.ids) - 1)
    if not document.loss[offset + 1 : end + 1].any():
        return None
    length = np.array([end - offset])
    return Pack(
        tokens=document.ids[offset:end].astype(np.int64),
        labels=document.ids[offset + 1 : end + 1].astype(np.int64),
        loss_mask=document.loss[offset + 1 : end + 1].astype(np.float32),
        lengths=length,
        spans=length,
        sample_id=-1,
    )


def _grouped(packs: Sequence[Pack], batch_tokens: int) -> Iterator[list[Pack]]:
    group: list[Pack] = []
    tokens = 0
    for pack in packs:
        group.append(pack)
        tokens += len(pack.tokens)
        if tokens >= batch_tokens:
            yield group
            group, tokens = [], 0
    if group:
        yield group
