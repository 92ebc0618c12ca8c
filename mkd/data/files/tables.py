"""Files that are tables of records: a class for each format. They need pyarrow, an optional dependency."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkd.errors import DataError

if TYPE_CHECKING:
    from pyarrow import RecordBatch

ROWS_PER_READ = 256  # rows held in memory at a time


class Table:
    """An open table. A format has a class that reads it in batches; others may be faster than this one."""

    names: list[str]  # of its columns
    num_bytes: int  # of the values, as the file has them

    def close(self) -> None:
        """Close the file."""

    def read(self, columns: Sequence[str] | None = None) -> Iterator[RecordBatch]:
        """Yield the rows in batches of any length, with these columns; None: all."""
        raise NotImplementedError

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return sum(batch.num_rows for batch in self.read())

    def batches(self, columns: Sequence[str] | None) -> Iterator[RecordBatch]:
        """Yield the rows in batches of at most ROWS_PER_READ."""
        for batch in self.read(columns):
            for start in range(0, batch.num_rows, ROWS_PER_READ):
                yield batch.slice(start, ROWS_PER_READ)

    def num_values(self, columns: Collection[str]) -> Counter[str]:
        """Return how many rows have a value in each of these columns."""
        counts = Counter[str]()
        for batch in self.read():
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                counts[name] += (name in columns) * (len(column) - column.null_count)
        return counts


class ParquetTable(Table):
    """Rows of nested columns always count as having a value."""

    def __init__(self, path: Path):
        from pyarrow.parquet import ParquetFile

        self._file = ParquetFile(path)
        self._groups = [self._file.metadata.row_group(i) for i in range(self._file.num_row_groups)]
        self.names = self._file.schema_arrow.names
        self.num_bytes = sum(group.total_byte_size for group in self._groups)

    def close(self) -> None:
        self._file.close()

    def read(self, columns: Sequence[str] | None = None) -> Iterator[RecordBatch]:
        yield from self._file.iter_batches(ROWS_PER_READ, columns=columns)

    @property
    def num_rows(self) -> int:
        return self._file.metadata.num_rows

    def num_values(self, columns: Collection[str]) -> Counter[str]:
        counts = Counter[str]()
        for group in self._groups:
            chunks = {chunk.path_in_schema: chunk for chunk in map(group.column, range(group.num_columns))}
            for name in columns:
                statistics = chunks[name].statistics if name in chunks else None
                counts[name] += group.num_rows - (statistics.null_count or 0 if statistics else 0)
        return counts


class ArrowTable(Table):
    """An IPC file, or an IPC stream, which Hugging Face datasets writes."""

    def __init__(self, path: Path):
        from pyarrow import memory_map

        self._source = memory_map(str(path))
        self.names, self.num_bytes = self._reader().schema.names, self._source.size()

    def close(self) -> None:
        self._source.close()

    def read(self, columns: Sequence[str] | None = None) -> Iterator[RecordBatch]:
        reader = self._reader()
        is_file = hasattr(reader, "get_batch")
        for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
            yield batch if columns is None else batch.select(columns)

    def _reader(self) -> Any:
        from pyarrow import ArrowInvalid, ipc

        try:
            return ipc.open_file(self._source)
        except ArrowInvalid:
            self._source.seek(0)
            return ipc.open_stream(self._source)


TABLES: Mapping[str, Callable[[Path], Table]] = {".parquet": ParquetTable, ".arrow": ArrowTable}
"""The formats of `data_files.TABLE_SUFFIXES`."""


@contextmanager
def open_table(path: Path) -> Iterator[Table]:
    """Open a table. Raises OSError, and DataError without pyarrow or for a damaged file.

    The error of a damaged file may come while it is read.
    """
    try:
        from pyarrow import ArrowException
    except ImportError as error:
        what, do = f"{path} needs pyarrow, which is not installed", "pip install pyarrow"
        raise DataError(what, do=do, code="data-package-missing") from error
    try:
        table = TABLES[path.suffix](path)
        try:
            yield table
        finally:
            table.close()
    except ArrowException as error:
        what, do = f"{path} is not a valid {path.suffix[1:]} file", "check that it was written completely"
        raise DataError(what, str(error), do, code="data-file-unreadable") from error
