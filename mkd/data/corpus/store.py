"""A tokenised corpus on disk: Megatron's `.bin/.idx`, a loss mask, images and a description."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import DType

from mkd.data.corpus.known_files import KnownFiles
from mkd.data.images.image_table import ImageTable
from mkd.errors import DataError

FORMAT_VERSION = 1
INDEX_HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the token type, sequences, documents + 1
SCAN_TOKENS = 1 << 22  # tokens, or documents, read at a time when a whole corpus is scanned
FORGETFUL = KnownFiles(None)
STUDENT = "student"
"""Entry of the description of a teacher's corpus: that of the student. The teacher may have no text in it."""
TAG = np.dtype(np.uint16)
PLACE = np.dtype(
    [("source", np.uint32), ("line", np.uint32)]
)  # of a document's record, see StoreFiles.places


@dataclass(frozen=True)
class StoreFiles:
    """The files of a corpus `PREFIX`."""

    prefix: str

    @property
    def bin(self) -> Path:  # token ids, uint16 or int32
        return Path(self.prefix + ".bin")

    @property
    def idx(self) -> Path:  # Megatron's index: type and sequence lengths
        return Path(self.prefix + ".idx")

    @property
    def loss_mask(self) -> Path:  # uint8 per token; absent if every token counts
        return Path(self.prefix + ".loss_mask.bin")

    @property
    def images(self) -> Path:  # a record for each image; absent if there is none
        return Path(self.prefix + ".images.bin")

    @property
    def image_sources(self) -> Path:  # paths and bytes of the images; absent if there is none
        return Path(self.prefix + ".image_sources.bin")

    @property
    def places(self) -> Path:  # a PLACE for each document; absent without a loss mask, and in older corpora
        return Path(self.prefix + ".places.bin")

    @property
    def numbers(self) -> Path:  # fp32 [documents, keys], see TokenStore.numbers; absent if there is no key
        return Path(self.prefix + ".numbers.bin")

    @property
    def tags(self) -> Path:  # uint16 [documents], see TokenStore.tags; absent if tags were not read
        return Path(self.prefix + ".tags.bin")

    @property
    def meta(self) -> Path:  # JSON, written last; absent for corpora that other programs wrote
        return Path(self.prefix + ".meta.json")

    @property
    def quarantine(self) -> Path:  # a line of JSON for each record that was skipped; absent if there was none
        return Path(self.prefix + ".quarantine.jsonl")

    @property
    def in_order(self) -> tuple[Path, ...]:
        """Files in the order of renaming: the one that readers look for comes last."""
        return (
            *(self.quarantine, self.loss_mask, self.places, self.images, self.image_sources),
            *(self.numbers, self.tags, self.bin, self.idx, self.meta),
        )


class TokenStore:
    """The documents of a tokenised corpus, memory-mapped. Unpickling reopens the files.

    Opening takes the same time for any number of documents. So the layout is trusted: `check_layout` once
    before.
    """

    def __init__(self, prefix: str):
        """Open the corpus PREFIX.bin, PREFIX.idx.

        Raises DataError if files are missing, or have the wrong size.
        """
        files = StoreFiles(prefix)
        self.prefix, self.meta = prefix, _read_meta(files.meta)  # {} without PREFIX.meta.json
        _require_files(files, may_be_empty=STUDENT in self.meta)
        self._dtype, num_sequences, num_borders = _read_header(files.idx)
        index = mapped_bytes(files.idx)[INDEX_HEADER.size :]
        # Numbers of each sequence: tokens, and bytes before it. Of each document, and one more: sequences.
        self._lengths = index[: 4 * num_sequences].view(np.int32)
        self._pointers = index[4 * num_sequences : 12 * num_sequences].view(np.int64)
        self._borders = index[12 * num_sequences : 12 * num_sequences + 8 * num_borders].view(np.int64)
        if not num_borders or self._borders[-1] != num_sequences:
            raise _damaged(files.idx, "its documents do not add up to its sequences")
        stop = self._pointers[-1] // self._dtype.itemsize + self._lengths[-1] if num_sequences else 0
        self.num_tokens = int(stop)
        _check_size(files.bin, self.num_tokens * self._dtype.itemsize)
        self._tokens, self._loss_mask = mapped_bytes(files.bin).view(self._dtype), None
        if self.meta.get("loss_mask") and not files.loss_mask.is_file():
            raise _damaged(
                files.loss_mask, "it does not exist, though the corpus was written with a loss mask"
            )
        if files.loss_mask.is_file():
            _check_size(files.loss_mask, self.num_tokens)
            self._loss_mask = mapped_bytes(files.loss_mask)
        self.numbers = self._read_numbers(files.numbers)  # key -> fp32 [documents], one for each record
        self.tag_names: tuple[str, ...] = tuple(self.meta.get("tags", ("",)))  # "" is that of no tag
        self.tags = self._read_tags(files.tags)  # uint16 [documents], number in `tag_names`; None: all are 0
        has_images = self.meta.get("images") or files.images.is_file()
        self.images = ImageTable(files.images, files.image_sources) if has_images else None

    def __reduce__(self) -> tuple[type[TokenStore], tuple[str]]:
        return TokenStore, (self.prefix,)

    def __len__(self) -> int:
        return len(self._borders) - 1

    def _read_numbers(self, path: Path) -> dict[str, np.ndarray]:
        keys = self.meta.get("numbers", ())
        if not keys:
            return {}
        if not path.is_file():
            raise _damaged(path, "it does not exist, though the corpus was written with numbers")
        _check_size(path, 4 * len(self) * len(keys))
        values = mapped_bytes(path).view(np.float32).reshape(len(self), len(keys))
        return dict(zip(keys, values.T, strict=True))

    def _read_tags(self, path: Path) -> np.ndarray | None:
        if "tags" not in self.meta:
            return None
        if not path.is_file():
            raise _damaged(path, "it does not exist, though the corpus was written with tags")
        _check_size(path, TAG.itemsize * len(self))
        return mapped_bytes(path).view(TAG)

    def tags_of(self, documents: np.ndarray) -> np.ndarray:
        """Return the numbers in `tag_names` of documents, int64."""
        if self.tags is None:
            return np.zeros(len(documents), dtype=np.int64)
        return self.tags[documents].astype(np.int64)

    @property
    def documents_per_record(self) -> int:
        """2 for a corpus of preference pairs (see documents.py), else 1. Packs take records whole or cut."""
        return 2 if self.meta.get("kinds") == ["pair"] else 1

    @property
    def has_loss_mask(self) -> bool:
        """True if some token of the corpus has no loss."""
        return self._loss_mask is not None

    @property
    def name(self) -> str:
        """The files that the corpus was made of, for messages; its prefix if they are not known."""
        return ", ".join(source["path"] for source in self.meta.get("sources", ())) or self.prefix

    def places(self, documents: Sequence[int]) -> list[tuple[str, int]]:
        """Return (file, line or row) of the records of documents.

        For a corpus without this information return its own file and the document's number, from 1.
        """
        path = StoreFiles(self.prefix).places
        if not path.exists() or path.stat().st_size != len(self) * PLACE.itemsize:
            return [(f"{self.prefix}.bin", document + 1) for document in documents]
        places, sources = np.memmap(path, PLACE, mode="r"), self.meta["sources"]
        found = (places[document] for document in documents)
        return [(sources[int(one["source"])]["path"], int(one["line"])) for one in found]

    def starts(self, documents: np.ndarray | slice | int) -> np.ndarray:
        """Return the first token of documents, int64; that of document len(self) is the number of tokens."""
        sequences = self._borders[documents]
        inside = np.minimum(sequences, len(self._pointers) - 1)
        return np.where(sequences > inside, self.num_tokens, self._pointers[inside] // self._dtype.itemsize)

    def lengths(self, documents: np.ndarray | int) -> np.ndarray:
        """Return the tokens of documents, int64."""
        return self.starts(documents + 1) - self.starts(documents)

    def lengths_between(self, first: int, last: int) -> np.ndarray:
        """Return the tokens of the documents [first, last), int64."""
        return np.diff(self.starts(slice(first, last + 1)))

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids [n] int64, loss [n] uint8) of a document; loss[i] is 1 if token i counts as a label."""
        return self.read(index, 0, int(self.lengths(index)))

    def read(self, document: int, offset: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, loss) of tokens [offset, offset + length) of a document, as `document` does."""
        start = int(self.starts(document)) + offset
        assert offset >= 0 and start + length <= self.starts(document + 1), "a read stays inside its document"
        return self.read_tokens(start, length)

    def read_tokens(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, loss) of tokens [start, start + length) of the whole corpus."""
        ids = self._tokens[start : start + length].astype(np.int64)
        if self._loss_mask is None:
            return ids, np.ones(length, dtype=np.uint8)
        return ids, np.array(self._loss_mask[start : start + length])

    def count_loss(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Count the labels in the ranges [starts, starts + lengths) of corpus positions; int64 [ranges].

        Ranges are sorted and do not overlap; the mask is read once, in parts.
        """
        if self._loss_mask is None:
            return lengths.astype(np.int64)
        counts, stops, first = np.zeros(len(starts), dtype=np.int64), starts + lengths, 0
        while first < len(starts):
            last = max(first + 1, int(np.searchsorted(starts, starts[first] + SCAN_TOKENS)))
            begin = starts[first]
            ones = np.cumsum(self._loss_mask[begin : stops[last - 1]], dtype=np.int64)
            ones = np.concatenate([[0], ones])
            counts[first:last] = ones[stops[first:last] - begin] - ones[starts[first:last] - begin]
            first = last
        return counts

    def check_layout(
        self, known: KnownFiles = FORGETFUL, progress: Callable[[], None] = lambda: None
    ) -> None:
        """Raise DataError unless sequences are contiguous in the .bin, and documents runs of sequences."""
        path = StoreFiles(self.prefix).idx
        why = known.fact(path, "layout", lambda: self._wrong_layout(progress))
        if why:
            raise _damaged(path, why)

    def check_token_range(
        self, vocab_size: int, known: KnownFiles = FORGETFUL, progress: Callable[[], None] = lambda: None
    ) -> None:
        """Raise DataError for the first token id outside [0, vocab_size).

        Read the corpus only if its description does not give the largest id.
        """
        if self.meta.get("max_token_id", vocab_size) < vocab_size:
            return
        path = StoreFiles(self.prefix).bin
        least, most = known.fact(path, "token range", lambda: self._token_range(progress))
        if least >= 0 and most < vocab_size:
            return
        for start, stop in parts(self.num_tokens):
            wrong = first_out_of_range(self._tokens[start:stop], vocab_size)
            if wrong is not None:
                borders = self.starts(slice(0, None))
                document = int(np.searchsorted(borders, start + wrong, side="right")) - 1
                raise self.out_of_range(document, int(self._tokens[start + wrong]), vocab_size)

    def check_content(
        self, known: KnownFiles = FORGETFUL, progress: Callable[[], None] = lambda: None
    ) -> None:
        """Raise DataError for a file whose content is not the described one."""
        for end, digest in self.meta.get("sha256", {}).items():
            path = Path(self.prefix + end)
            if not path.is_file() or known.sha256(path, progress) != digest:
                raise _damaged(path, "its SHA-256 is not the one recorded when it was written")

    def out_of_range(self, document: int, token_id: int, vocab_size: int) -> DataError:
        """Return the error for an id that the model does not have, in whatever way the corpus was made."""
        has, knows = f"has token id {token_id}", f"the model knows 0 to {vocab_size - 1}"
        if self.meta.get("cache_key"):  # of records, with the tokenizer of the run
            ((path, line),) = self.places([document])
            what = f"{path}:{line}: the record {has}, {knows}"
            why = "the tokenizer has tokens for which the model has no row, and this text holds one of them"
            do = "remove the token from the text, or use a model that was resized for its tokenizer"
        else:
            what = f"{self.prefix}.bin: document {document} {has}, {knows}"
            why = "the corpus was made with another tokenizer, or the file is damaged"
            do = "tokenise the corpus with the tokenizer of this model: `mkd preprocess`"
        return DataError(what, why, do, code="token-beyond-vocabulary")

    def _token_range(self, progress: Callable[[], None]) -> tuple[int, int]:
        least, most = 0, -1
        for start, stop in parts(self.num_tokens):
            ids = self._tokens[start:stop]
            least, most = min(least, int(ids.min())), max(most, int(ids.max()))
            progress()
        return least, most

    def _wrong_layout(self, progress: Callable[[], None]) -> str | None:
        """Return what is wrong in the index, None if nothing is."""
        expected = 0
        for first, last in parts(len(self._lengths)):
            lengths = self._lengths[first:last]
            if lengths.min() < 0:
                place = int(np.argmax(lengths < 0))
                return f"sequence {first + place} has {lengths[place]} tokens"
            stops = expected + np.cumsum(lengths, dtype=np.int64) * self._dtype.itemsize
            astray = self._pointers[first:last] != stops - lengths * np.int64(self._dtype.itemsize)
            if astray.any():
                return (
                    f"sequence {first + int(np.argmax(astray))} does not start where the one before it ends"
                )
            expected = stops[-1]
            progress()
        for first, last in parts(len(self._borders)):
            if np.any(np.diff(self._borders[max(first - 1, 0) : last]) < 0) or self._borders[0] != 0:
                return "the numbers of its documents do not ascend from 0"
            progress()
        return None


def parts(count: int) -> Iterator[tuple[int, int]]:
    """Yield [first, last) of consecutive parts of `count` numbers that fit into little memory."""
    for first in range(0, count, SCAN_TOKENS):
        yield first, min(first + SCAN_TOKENS, count)


def first_out_of_range(ids: np.ndarray, vocab_size: int) -> int | None:
    """Return the position of the first id outside [0, vocab_size), None if there is none."""
    if ids.size == 0 or (ids.min() >= 0 and ids.max() < vocab_size):
        return None
    return int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])


def _read_meta(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(meta, dict) or meta.get("format_version") != FORMAT_VERSION:
        raise _damaged(path, f"this program reads format version {FORMAT_VERSION}")
    return meta


def _require_files(files: StoreFiles, may_be_empty: bool) -> None:
    missing = [str(path) for path in (files.bin, files.idx) if not path.is_file()]
    if missing:
        raise DataError(
            f"{files.prefix}: {' and '.join(missing)} not found",
            "a tokenised corpus is a pair of .bin and .idx files",
            "check the path, or make the pair with `mkd preprocess`",
            code="data-path-not-found",
        )
    if files.bin.stat().st_size == 0 and not may_be_empty:
        raise DataError(
            f"{files.bin} is empty",
            "there is nothing to train on",
            "tokenise the corpus again",
            code="corpus-damaged",
        )


def _read_header(path: Path) -> tuple[np.dtype, int, int]:
    """Return (type of the tokens, sequences, documents + 1) of an index.

    Raises DataError if the header is damaged, or does not fit the size of the file.
    """
    with path.open("rb") as file:
        header = file.read(INDEX_HEADER.size)
    if len(header) < INDEX_HEADER.size:
        raise _damaged(path, f"it has {len(header)} bytes, less than a header")
    magic, version, code, sequences, borders = INDEX_HEADER.unpack(header)
    if magic != b"MMIDIDX\0\0" or version != 1 or code not in {dtype.value for dtype in DType}:
        raise _damaged(path, "it does not start as a Megatron index does")
    dtype = np.dtype(DType.dtype_from_code(code))
    if not np.issubdtype(dtype, np.integer):
        raise _damaged(path, f"its tokens are of type {dtype.name}, and token ids are whole numbers")
    expected, size = INDEX_HEADER.size + 12 * sequences + 8 * borders, path.stat().st_size
    # Multimodal indices have a byte more per sequence.
    if size not in (expected, expected + sequences):
        raise _damaged(path, f"it has {size} bytes where its header says {expected}")
    return dtype, sequences, borders


def mapped_bytes(path: Path) -> np.ndarray:
    """Return the bytes of a file, uint8, which are read where they are needed."""
    if not path.stat().st_size:  # which cannot be mapped
        return np.zeros(0, dtype=np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)


def _check_size(path: Path, expected: int) -> None:
    size = path.stat().st_size
    if size != expected:
        raise _damaged(path, f"it has {size} bytes where the index says {expected}")


def _damaged(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} is damaged or incomplete",
        why,
        "tokenise the corpus again: `mkd preprocess`",
        code="corpus-damaged",
    )
