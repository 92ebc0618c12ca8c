"""A tokenised corpus on disk: Megatron's `.bin/.idx`, a loss mask and a description."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset

from mkd.errors import DataError

FORMAT_VERSION = 1
INDEX_HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the token type, sequences, documents + 1
SCAN_TOKENS = 1 << 24  # tokens read at a time when a whole corpus is scanned


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
    def meta(self) -> Path:  # JSON, written last; absent for corpora that other programs wrote
        return Path(self.prefix + ".meta.json")

    @property
    def quarantine(self) -> Path:  # a line of JSON for each record that was skipped; absent if there was none
        return Path(self.prefix + ".quarantine.jsonl")

    @property
    def in_order(self) -> tuple[Path, ...]:
        """Files in the order of renaming: the one that readers look for comes last."""
        return self.quarantine, self.loss_mask, self.bin, self.idx, self.meta


class TokenStore:
    """The documents of a tokenised corpus, memory-mapped. Unpickling reopens the files."""

    def __init__(self, prefix: str, indexed: IndexedDataset, loss_mask: np.ndarray | None, meta: dict):
        self.prefix = prefix
        self.meta = meta  # {} without PREFIX.meta.json
        self._indexed = indexed
        self._loss_mask = loss_mask
        sequence_ends = np.concatenate([[0], np.cumsum(indexed.sequence_lengths, dtype=np.int64)])
        # int64 [documents + 1], first token of each document
        self.offsets = sequence_ends[indexed.document_indices]

    @classmethod
    def open(cls, prefix: str) -> TokenStore:
        """Open the corpus PREFIX.bin, PREFIX.idx.

        Raises DataError if files are missing, damaged or inconsistent.
        """
        files = StoreFiles(prefix)
        missing = [str(path) for path in (files.bin, files.idx) if not path.is_file()]
        if missing:
            raise DataError(
                f"{prefix}: {' and '.join(missing)} not found",
                "a tokenised corpus is a pair of .bin and .idx files",
                "check the path, or make the pair with `mkd preprocess`",
                code="corpus-files-missing",
            )
        if files.bin.stat().st_size == 0:
            raise DataError(
                f"{files.bin} is empty",
                "there is nothing to train on",
                "tokenise the corpus again",
                code="corpus-empty",
            )
        _check_index(files.idx)
        try:
            indexed = IndexedDataset(prefix)
        except AssertionError as error:
            raise _damaged(files.idx, "its documents do not add up to its sequences") from error
        _check_pointers(files.idx, indexed)
        num_tokens = int(np.sum(indexed.sequence_lengths, dtype=np.int64))
        _check_size(files.bin, num_tokens * DType.size(indexed.index.dtype))
        meta, loss_mask = _read_meta(files.meta), None
        if meta.get("loss_mask") and not files.loss_mask.is_file():
            raise _damaged(
                files.loss_mask, "it does not exist, though the corpus was written with a loss mask"
            )
        if files.loss_mask.is_file():
            _check_size(files.loss_mask, num_tokens)
            loss_mask = np.memmap(files.loss_mask, dtype=np.uint8, mode="r")
        return cls(prefix, indexed, loss_mask, meta)

    def __reduce__(self):
        return TokenStore.open, (self.prefix,)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]."""
        return np.diff(self.offsets)

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids [n] int64, loss [n] uint8) of a document; loss[i] is 1 if token i counts as a label."""
        return self.read(index, 0, int(self.lengths[index]))

    def read(self, document: int, offset: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the same as `document`, for its tokens [offset, offset + length)."""
        start = int(self.offsets[document]) + offset
        assert offset >= 0 and start + length <= self.offsets[document + 1], (
            "a read stays inside its document"
        )
        if self._loss_mask is None:
            return self._ids(start, length), np.ones(length, dtype=np.uint8)
        return self._ids(start, length), np.array(self._loss_mask[start : start + length])

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

    def check_token_range(self, vocab_size: int) -> None:
        """Raise DataError for the first token id outside [0, vocab_size).

        Read the corpus only if its description does not give the largest id.
        """
        if self.meta.get("max_token_id", vocab_size) < vocab_size:
            return
        for start in range(0, self.num_tokens, SCAN_TOKENS):
            ids = self._ids(start, min(SCAN_TOKENS, self.num_tokens - start))
            wrong = first_out_of_range(ids, vocab_size)
            if wrong is not None:
                document = int(np.searchsorted(self.offsets, start + wrong, side="right")) - 1
                raise self.out_of_range(document, int(ids[wrong]), vocab_size)

    def check_content(self, progress: Callable[[], None] = lambda: None) -> None:
        """Raise DataError for a file whose content is not the described one.

        Reads all files if there is a description.
        """
        files, known = StoreFiles(self.prefix), self.meta.get("sha256", {})
        found = content_hashes(files, progress) if known else {}
        for end, digest in known.items():
            if found.get(end) != digest:
                raise _damaged(
                    Path(self.prefix + end), "its SHA-256 is not the one recorded when it was written"
                )

    def out_of_range(self, document: int, token_id: int, vocab_size: int) -> DataError:
        return DataError(
            f"{self.prefix}.bin: document {document} has token id {token_id}, "
            f"the model knows 0 to {vocab_size - 1}",
            "the corpus was made with another tokenizer, or the file is damaged",
            "tokenise the corpus with the tokenizer of this model: `mkd preprocess`",
            code="corpus-token-beyond-vocabulary",
        )

    def _ids(self, start: int, length: int) -> np.ndarray:
        """Return a copy, int64 [length].

        A view would not do: Megatron unmaps the file under live views when it deletes a data set.
        """
        dtype = self._indexed.index.dtype
        return self._indexed.bin_reader.read(dtype, length, start * DType.size(dtype)).astype(np.int64)


def content_hashes(files: StoreFiles, progress: Callable[[], None] = lambda: None) -> dict[str, str]:
    """Return suffix -> SHA-256 of the content, for the tokens, the index and the mask of a corpus."""
    paths = {
        path.name.removeprefix(Path(files.prefix).name): path
        for path in (files.bin, files.idx, files.loss_mask)
    }
    return {end: sha256_of_file(path, progress) for end, path in paths.items() if path.exists()}


def sha256_of_file(path: str | Path, progress: Callable[[], None] = lambda: None) -> str:
    """Return the SHA-256 of a file; `progress` is called for every block, and may raise."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            progress()
    return digest.hexdigest()


def first_out_of_range(ids: np.ndarray, vocab_size: int) -> int | None:
    """Return the position of the first id outside [0, vocab_size), None if there is none."""
    if ids.size == 0 or (ids.min() >= 0 and ids.max() < vocab_size):
        return None
    return int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])


def _read_meta(path: Path) -> dict:
    if not path.is_file():
        return {}
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(meta, dict) or meta.get("format_version") != FORMAT_VERSION:
        raise _damaged(path, f"this program reads format version {FORMAT_VERSION}")
    return meta


def _check_index(path: Path) -> None:
    """Check the header of an index, because Megatron's reader trusts it.

    Raises DataError if it is damaged.
    """
    with path.open("rb") as file:
        header = file.read(INDEX_HEADER.size)
    if len(header) < INDEX_HEADER.size:
        raise _damaged(path, f"it has {len(header)} bytes, less than a header")
    magic, version, dtype_code, sequences, documents = INDEX_HEADER.unpack(header)
    if magic != b"MMIDIDX\0\0" or version != 1 or dtype_code not in {dtype.value for dtype in DType}:
        raise _damaged(path, "it does not start as a Megatron index does")
    if not np.issubdtype(DType.dtype_from_code(dtype_code), np.integer):
        raise _damaged(
            path, f"its tokens are of type {DType(dtype_code).name}, and token ids are whole numbers"
        )
    expected = INDEX_HEADER.size + 12 * sequences + 8 * documents
    # Multimodal indices have a byte more per sequence.
    if path.stat().st_size not in (expected, expected + sequences):
        raise _damaged(path, f"it has {path.stat().st_size} bytes where its header says {expected}")


def _check_pointers(path: Path, indexed: IndexedDataset) -> None:
    """Check the layout that `TokenStore` relies on.

    Sequences are contiguous in the .bin, and documents are runs of sequences.
    """
    lengths, documents = indexed.sequence_lengths, indexed.document_indices
    if np.any(lengths < 0):
        raise _damaged(path, f"sequence {int(np.argmax(lengths < 0))} has {int(lengths.min())} tokens")
    starts = (np.cumsum(lengths, dtype=np.int64) - lengths) * DType.size(indexed.index.dtype)
    astray = indexed.index.sequence_pointers != starts
    if np.any(astray):
        raise _damaged(path, f"sequence {int(np.argmax(astray))} does not start where the one before it ends")
    if documents[0] != 0 or np.any(np.diff(documents) < 0):
        raise _damaged(path, "the numbers of its documents do not ascend from 0")


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
