"""A teacher's top-k log-probabilities on disk: exported once, read by any number of runs.

A cache is a folder: `meta.json`, and for each data set (`train`, `valid`) shards `train-00000.parquet`, ...
of `samples_per_shard` packs. A row of a shard is one pack, found by its number, so that neither data order
nor layout matter. Rows are grouped in small groups, so that reading one row reads little else. Every row has
a digest of the pack that the teacher saw: packs that have changed since are refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from mkd.data.batch import Pack
from mkd.data.corpus.drafts import draft_name, remove_left_behind
from mkd.data.dataset import BlendedDataset
from mkd.data.stored.teacher_rows import TeacherRows
from mkd.errors import DataError

FORMAT_VERSION = 2  # pages with checksums
META_FILE = "meta.json"
# Size of the packs that are read together: small, because shuffled packs are read one by one.
GROUP_BYTES = 1 << 20
OPEN_FILES = 64
CACHED_GROUPS = 8
DTYPES = {"float16": np.float16, "float32": np.float32}
CHAT_DATE = "chat_date"  # in `TopKMeta.data`; absent if no template wrote it, and in earlier exports
UNKNOWN_PRECISION = "fp32 or bf16"  # of a cache of version 0.1.0, which does not say


@dataclass(frozen=True)
class TopKMeta:
    """The description of a cache: its contents, and the settings that a run must share to train from it."""

    k: int
    temperature: float
    logprob_dtype: str  # float16 or float32
    vocab_size: int  # number of ids that the log-probabilities are normalised over
    teacher: str  # place of its weights, for people
    weights_fingerprint: str  # SHA-256 over config and weights
    vocabulary_fingerprint: str  # `Tokenizer.vocabulary_fingerprint`
    data: dict  # the settings that decide which tokens make a pack
    parts: dict[str, int]  # data set -> packs
    samples_per_shard: int
    format_version: int = field(default=FORMAT_VERSION)
    precision: str = UNKNOWN_PRECISION  # of the teacher's products: fp32, bf16, or fp8 and its recipe

    @property
    def is_rounded(self) -> bool:
        """True if the teacher's layers multiplied in a lower precision than its weights have."""
        return self.precision not in ("fp32", "bf16", UNKNOWN_PRECISION)

    @property
    def chat_date(self) -> str | None:
        """Date that the chat template wrote; None if it wrote none, or the export does not say."""
        date = self.data.get(CHAT_DATE)
        return date if isinstance(date, str) else None

    @classmethod
    def read(cls, folder: Path) -> TopKMeta:
        """Return the description in `folder`. Raises DataError if there is no readable cache."""
        path = folder / META_FILE
        if not path.is_file():
            raise DataError(
                f"{folder} holds no teacher cache",
                f"there is no {META_FILE}",
                "name the --out folder of `mkd topk`",
                code="teacher-cache-not-found",
            )
        try:
            meta = json.loads(path.read_text(encoding="utf-8"))
            if meta["format_version"] != FORMAT_VERSION:
                raise ValueError(
                    f"it has format version {meta['format_version']}, this program reads {FORMAT_VERSION}"
                )
            if not isinstance(meta["data"], dict) or not isinstance(meta["parts"], dict):
                raise ValueError("data and parts are not objects")
            return cls(**meta)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} does not describe a teacher cache",
                str(error),
                "export the cache again",
                code="teacher-cache-incomplete",
            ) from error

    def write(self, folder: Path) -> None:
        """Write the description, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / (META_FILE + ".partial")
        partial.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        partial.replace(folder / META_FILE)

    def shard_path(self, folder: Path, part: str, shard: int) -> Path:
        return folder / f"{part}-{shard:05d}.parquet"

    def num_shards(self, part: str) -> int:
        return -(-self.parts[part] // self.samples_per_shard)

    def shard_samples(self, part: str, shard: int) -> range:
        first = shard * self.samples_per_shard
        return range(first, min(first + self.samples_per_shard, self.parts[part]))

    def missing_shards(self, folder: Path, part: str) -> list[int]:
        return [i for i in range(self.num_shards(part)) if not self.shard_path(folder, part, i).is_file()]

    @property
    def samples_per_group(self) -> int:
        """Packs of a row group, from the largest size that a pack can have."""
        row_bytes = self.k * (4 + np.dtype(DTYPES[self.logprob_dtype]).itemsize) + 12
        return max(1, GROUP_BYTES // (row_bytes * self.data["seq_length"]))


def pack_digest(pack: Pack) -> bytes:
    """Return 16 bytes that identify a pack: a digest of tokens, labels, mask, document borders, images."""
    digest = hashlib.blake2b(digest_size=16)
    for array in (pack.tokens, pack.labels, pack.loss_mask, pack.lengths, pack.spans):
        digest.update(np.ascontiguousarray(array).tobytes())
    if pack.images is not None:
        digest.update(pack.images.records["sha256"].tobytes())
    return digest.digest()


class ShardWriter:
    """Writes the packs of one shard, in ascending order.

    The file gets its name when the `with` block ends without error.
    """

    def __init__(self, path: Path, meta: TopKMeta):
        pa, self._pq = load_pyarrow()
        self._pa, self._path, self._meta = pa, path, meta
        self._partial = path.with_name(draft_name(path.name))
        values = pa.list_(pa.from_numpy_dtype(DTYPES[meta.logprob_dtype]))
        self._schema = pa.schema(
            {
                "sample_id": pa.int64(),
                "digest": pa.binary(16),
                "ids": pa.list_(pa.int32()),  # [n * k]
                "logprobs": values,  # [n * k]
                # [n * 3]: logarithm of the top-k mass, cross entropy, entropy
                "statistics": pa.list_(pa.float32()),
            }
        )
        self._rows: list[dict] = []

    def __enter__(self) -> ShardWriter:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        remove_left_behind(str(self._path))
        # Store high and low bytes apart: the high bytes of neighbours are alike, which saves a fifth.
        encoding = {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in ("ids", "logprobs")}
        self._file = self._pq.ParquetWriter(
            self._partial,
            self._schema,
            compression="zstd",
            use_dictionary=False,
            column_encoding=encoding,
            write_page_checksum=True,
        )
        return self

    def add(
        self,
        sample_id: int,
        digest: bytes,
        ids: np.ndarray,  # [n, k]
        logprobs: np.ndarray,  # [n, k]
        metrics: np.ndarray,  # [n, 2]
    ) -> None:
        mass = np.exp(logprobs.astype(np.float64)).sum(axis=1, keepdims=True)
        statistics = np.concatenate([np.log(mass), metrics], axis=1).astype(np.float32)
        stored = logprobs.astype(DTYPES[self._meta.logprob_dtype])
        row = dict(
            sample_id=sample_id,
            digest=digest,
            ids=ids.astype(np.int32),
            logprobs=stored,
            statistics=statistics,
        )
        self._rows.append(
            {name: value.ravel() if isinstance(value, np.ndarray) else value for name, value in row.items()}
        )
        if len(self._rows) == self._meta.samples_per_group:
            self._write_group()

    def __exit__(self, error_type, *_) -> None:
        if error_type is None:
            self._write_group()
        self._file.close()
        if error_type is None:
            with open(self._partial, "rb") as file:
                os.fsync(file.fileno())
            self._partial.replace(self._path)
        else:
            self._partial.unlink(missing_ok=True)

    def _write_group(self) -> None:
        if self._rows:
            columns = {name: [row[name] for row in self._rows] for name in self._schema.names}
            self._file.write_table(
                self._pa.table(columns, schema=self._schema), row_group_size=len(self._rows)
            )
            self._rows = []


class TopKPart:
    """The rows of one data set of a cache, by pack number. Can be pickled for workers."""

    def __init__(self, folder: Path, part: str, meta: TopKMeta):
        """Open one data set of the cache.

        Raises DataError for a part that the cache lacks, and for an export that has not finished.
        """
        self._folder, self._part, self.meta = folder, part, meta
        if part not in meta.parts:
            raise DataError(
                f"the teacher cache {folder} has no {part} data",
                "the export had none of it",
                "export again with the data flags of this run (--valid-data-path, --split), "
                "or drop --eval-interval",
                code="teacher-cache-differs",
            )
        missing = meta.missing_shards(folder, part)
        if missing:
            raise DataError(
                f"the teacher cache {folder} is incomplete",
                f"{len(missing)} of {meta.num_shards(part)} {part} shards are missing: "
                "the export has not finished",
                "start the same `mkd topk` command again; it resumes where it stopped",
                code="teacher-cache-incomplete",
            )
        self._file = lru_cache(OPEN_FILES)(self._open)
        self._group = lru_cache(CACHED_GROUPS)(self._read_group)

    def __reduce__(self):
        return TopKPart, (self._folder, self._part, self.meta)

    def rows(self, sample_id: int, digest: bytes) -> TeacherRows:
        """Return the teacher's rows of pack `sample_id`.

        Raises DataError if the teacher saw another pack, or for a damaged file.
        """
        shard, place = divmod(sample_id, self.meta.samples_per_shard)
        group, place = divmod(place, self.meta.samples_per_group)
        table = self._group(shard, group)
        path = self.meta.shard_path(self._folder, self._part, shard)
        if place >= len(table["sample_id"]) or table["sample_id"][place].as_py() != sample_id:
            raise _damaged(path, f"pack {sample_id} is not where it should be")
        if table["digest"][place].as_py() != digest:
            raise DataError(
                f"{self._folder}: the teacher saw another {self._part} pack {sample_id} than this run has",
                "the text, the tokenizer or a setting that decides how documents become packs "
                "has changed since the export",
                "use the data of the export, or export again into another folder",
                code="teacher-cache-differs",
            )
        ids, logprobs, statistics = (
            _values(table[name], place) for name in ("ids", "logprobs", "statistics")
        )
        statistics = statistics.reshape(-1, 3)
        logprobs = logprobs.reshape(len(statistics), -1).astype(np.float64)
        # The mass is stored separately in full precision: half precision would put its error into the rest.
        logprobs += statistics[:, :1] - np.log(np.exp(logprobs).sum(axis=1, keepdims=True))
        return TeacherRows(
            ids=torch.from_numpy(ids.reshape(len(statistics), -1)),
            logprobs=torch.from_numpy(logprobs.astype(np.float32)),
            metrics=torch.from_numpy(statistics[:, 1:].copy()),
            vocab_size=self.meta.vocab_size,
        )

    def _open(self, shard: int):
        pa, pq = load_pyarrow()
        path = self.meta.shard_path(self._folder, self._part, shard)
        try:
            return pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            raise _damaged(path, str(error)) from error

    def _read_group(self, shard: int, group: int):
        """Return a table of packs."""
        pa, _ = load_pyarrow()
        try:
            return self._file(shard).read_row_group(group, use_threads=False).combine_chunks()
        except (pa.ArrowException, OSError) as error:
            raise _damaged(self.meta.shard_path(self._folder, self._part, shard), str(error)) from error


class TaughtDataset(BlendedDataset):
    """A data set whose packs carry the teacher's rows."""

    def __init__(self, dataset: BlendedDataset, part: TopKPart):
        """Join a data set and the teacher's rows for it.

        Raises DataError if the cache was not made from this data set; the first, middle and last pack are
        compared.
        """
        super().__init__(dataset.members, dataset.weights)
        self._part = part
        exported = part.meta.parts[part._part]
        if exported != len(self):
            raise DataError(
                f"{part._folder}: the teacher cache has {exported} packs, this run has {len(self)}",
                "it was made from other data, or with other settings of it",
                "use the data of the export, or export again into another folder",
                code="teacher-cache-differs",
            )
        for index in {0, len(self) // 2, len(self) - 1}:
            self[index]

    def __getitem__(self, index: int) -> Pack:
        pack = super().__getitem__(index)
        rows = self._part.rows(index, pack_digest(pack))
        assert len(rows.ids) == np.count_nonzero(pack.loss_mask)
        return replace(pack, teacher_inputs=(rows,))

    def empty_pack(self) -> Pack:
        rows = TeacherRows.empty(self._part.meta.k, self._part.meta.vocab_size)
        return replace(super().empty_pack(), teacher_inputs=(rows,))


def load_pyarrow() -> tuple[ModuleType, ModuleType]:
    """Return (pyarrow, pyarrow.parquet), an optional dependency. Raises DataError if it is missing."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            "a teacher cache needs pyarrow, which is not installed",
            do="pip install pyarrow",
            code="data-package-missing",
        ) from error
    return pyarrow, pyarrow.parquet


def _values(column, place: int) -> np.ndarray:
    """Return a copy of the numbers of one pack in a column of lists."""
    return np.array(column[place].values.to_numpy(zero_copy_only=False))


def _damaged(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} is damaged",
        why,
        "delete this file and export again: only what is missing is made",
        code="teacher-cache-incomplete",
    )
