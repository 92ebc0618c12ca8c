"""The shards of a cache of a teacher's outputs: written once, read by any number of runs.

A row of a shard is one pack, found by its number, so that neither data order nor layout matter. Rows are
grouped in small groups, so that reading one row reads little else. Every row has a digest of the pack that
the teacher saw: packs that have changed since are refused. Kinds of caches differ in the columns.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mkd.data.batch import Pack
from mkd.data.corpus.drafts import draft_name, remove_left_behind
from mkd.data.dataset import BlendedDataset
from mkd.data.stored.cache_meta import CacheMeta
from mkd.errors import DataError

if TYPE_CHECKING:
    from pyarrow import Table
    from pyarrow.parquet import ParquetFile

OPEN_FILES = 64
CACHED_GROUPS = 8
EXPORT_ID = "mkd.export_id"  # in a shard's metadata


def pack_digest(pack: Pack) -> bytes:
    """Return 16 bytes that identify a pack: a digest of tokens, labels, mask, document borders, images."""
    digest = hashlib.blake2b(digest_size=16)
    for array in (pack.tokens, pack.labels, pack.loss_mask, pack.lengths, pack.spans):
        digest.update(np.ascontiguousarray(array).tobytes())
    if pack.images is not None:
        digest.update(pack.images.records["sha256"].tobytes())
    return digest.digest()


class ShardWriter:
    """Writes the packs of one shard, in ascending order. Kinds of caches have subclasses.

    The file gets its name when the `with` block ends without error.
    """

    options: ClassVar[dict[str, Any]] = {"compression": "zstd"}  # of the file

    def __init__(self, path: Path, meta: CacheMeta):
        self._pa, self._pq = load_pyarrow()
        self._path, self._meta = path, meta
        self._partial = path.with_name(draft_name(path.name))
        types = {"sample_id": self._pa.int64(), "digest": self._pa.binary(16)}
        metadata = {EXPORT_ID: meta.export_id} if meta.export_id else None
        self._schema = self._pa.schema(types | self._types(self._pa), metadata)
        self._rows: list[dict[str, Any]] = []

    def _types(self, pa: ModuleType) -> dict[str, Any]:
        """Return the types of the columns besides number and digest."""
        raise NotImplementedError

    def _encodings(self) -> dict[str, str]:
        """Return the encodings of columns, by their paths in the file."""
        return {}

    def _row(self, *columns: np.ndarray) -> dict[str, Any]:
        """Return the values of a pack, from what the export has of its n loss positions."""
        raise NotImplementedError

    def _array(self, name: str, values: list[Any]) -> Any:
        """Return a column of some packs."""
        return self._pa.array(values, self._schema.field(name).type)

    def __enter__(self) -> ShardWriter:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        remove_left_behind(str(self._path))
        self._file = self._pq.ParquetWriter(
            self._partial,
            self._schema,
            use_dictionary=False,
            column_encoding=self._encodings() or None,
            write_page_checksum=True,
            **self.options,
        )
        return self

    def add(self, sample_id: int, digest: bytes, *columns: np.ndarray) -> None:
        """Add a pack. `columns` are those of its loss positions, each [n, ...]."""
        self._rows.append(dict(sample_id=sample_id, digest=digest) | self._row(*columns))
        if len(self._rows) == self._meta.samples_per_group:
            self._write_group()

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self._write_group()
        self._file.close()
        if kind is None:
            with open(self._partial, "rb") as file:
                os.fsync(file.fileno())
            self._partial.replace(self._path)
        else:
            self._partial.unlink(missing_ok=True)

    def _write_group(self) -> None:
        if self._rows:
            arrays = [self._array(name, [row[name] for row in self._rows]) for name in self._schema.names]
            table = self._pa.table(arrays, schema=self._schema)
            self._file.write_table(table, row_group_size=len(self._rows))
            self._rows = []


class CachePart:
    """The rows of one data set of a cache, by pack number. Can be pickled for workers.

    Kinds of caches have subclasses.
    """

    def __init__(self, folder: Path, part: str, meta: CacheMeta):
        """Open one data set of the cache.

        Raises DataError for a part that the cache lacks, and for an export that has not finished.
        """
        self.folder, self.part, self.meta = folder, part, meta
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
                f"start the same `{meta.command}` command again; it resumes where it stopped",
                code="teacher-cache-incomplete",
            )
        self._file = lru_cache(OPEN_FILES)(self._open)
        self._group = lru_cache(CACHED_GROUPS)(self._read_group)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder, self.part, self.meta)

    def rows(self, sample_id: int, digest: bytes) -> Any:
        """Return the teacher's part of pack `sample_id`.

        Raises DataError if the teacher saw another pack, or for a damaged file.
        """
        shard, place = divmod(sample_id, self.meta.samples_per_shard)
        group, place = divmod(place, self.meta.samples_per_group)
        table = self._group(shard, group)
        if place >= len(table["sample_id"]) or table["sample_id"][place].as_py() != sample_id:
            raise damaged(self.shard_path(shard), f"pack {sample_id} is not where it should be")
        if table["digest"][place].as_py() != digest:
            raise DataError(
                f"{self.folder}: the teacher saw another {self.part} pack {sample_id} than this run has",
                "the text, the tokenizer or a setting that decides how documents become packs "
                "has changed since the export",
                "use the data of the export, or export again into another folder",
                code="teacher-cache-differs",
            )
        return self._decoded(table, place)

    @property
    def _columns(self) -> list[str] | None:
        """Names of the columns that are read; None: all."""
        return None

    def _decoded(self, table: Table, place: int) -> Any:
        """Return the teacher's part of a pack of a row group."""
        raise NotImplementedError

    def empty(self) -> Any:
        """Return the teacher's part of a pack without loss."""
        raise NotImplementedError

    def require_shards(self) -> None:
        """Raise DataError for a shard that cannot be opened, or lacks packs. Reads the ends of all files."""
        for shard in range(self.meta.num_shards(self.part)):
            found, wanted = (
                self._open(shard).metadata.num_rows,
                len(self.meta.shard_samples(self.part, shard)),
            )
            if found != wanted:
                raise damaged(self.shard_path(shard), f"it has {found} of {wanted} packs")

    def shard_path(self, shard: int) -> Path:
        return self.meta.shard_path(self.folder, self.part, shard)

    def _open(self, shard: int) -> ParquetFile:
        pa, pq = load_pyarrow()
        path = self.shard_path(shard)
        try:
            file = pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            raise damaged(path, str(error)) from error
        if (file.metadata.metadata or {}).get(EXPORT_ID.encode(), b"").decode() != self.meta.export_id:
            raise not_usable(f"{path} was written by another export", "its teacher or settings may differ")
        return file

    def _read_group(self, shard: int, group: int) -> Table:
        """Return a table of packs."""
        pa, _ = load_pyarrow()
        try:
            table = self._file(shard).read_row_group(group, self._columns, use_threads=False)
            return table.combine_chunks()
        except (pa.ArrowException, OSError) as error:
            raise damaged(self.shard_path(shard), str(error)) from error


class TaughtDataset(BlendedDataset):
    """A data set whose packs carry a teacher's rows behind those of other teachers."""

    def __init__(self, dataset: BlendedDataset, part: CachePart):
        """Join a data set and the teacher's rows for it.

        Raises DataError if the cache was not made from this data set; the first, middle and last pack are
        compared.
        """
        super().__init__(dataset.members, dataset.weights)
        self._dataset, self._part = dataset, part
        exported = part.meta.parts[part.part]
        if exported != len(self):
            raise DataError(
                f"{part.folder}: the teacher cache has {exported} packs, this run has {len(self)}",
                "it was made from other data, or with other settings of it",
                "use the data of the export, or export again into another folder",
                code="teacher-cache-differs",
            )
        for index in {0, len(self) // 2, len(self) - 1}:
            self[index]

    def require_shards(self) -> None:
        """See `CachePart`."""
        self._part.require_shards()

    def __getitem__(self, index: int) -> Pack:
        pack = self._dataset[index]
        rows = self._part.rows(index, pack_digest(pack))
        return replace(pack, teacher_inputs=(*pack.teacher_inputs, rows))

    def empty_pack(self) -> Pack:
        pack = self._dataset.empty_pack()
        return replace(pack, teacher_inputs=(*pack.teacher_inputs, self._part.empty()))


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


def damaged(path: Path, why: str) -> DataError:
    """Return the error of a damaged file of a cache."""
    return not_usable(f"{path} is damaged", why)


def not_usable(what: str, why: str) -> DataError:
    """Return the error of a file of a cache that must be made again."""
    do = "delete this file and export again: only what is missing is made"
    return DataError(what, why, do, code="teacher-cache-incomplete")
