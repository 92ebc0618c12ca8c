"""Arrays in one file: written in parts, whole or not at all, and read memory-mapped.

The file starts with a header: JSON, padded with blanks. The arrays follow one after the other.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np

from mkd.data.corpus.drafts import draft_name, remove_left_behind
from mkd.data.corpus.known_files import BLOCK_BYTES, sha256_of_file
from mkd.errors import DataError

FORMAT_VERSION = 1
HEADER_BYTES = 4096


class ArrayFile:
    """One-dimensional arrays of records by name, memory-mapped, and the JSON `values` that belong to them.

    Unpickling maps the file again.
    """

    def __init__(self, path: Path, key: str):
        """Open the file that was written with `key`. Raises DataError if it is another one or not whole."""
        self.path, self.key = path, key
        try:
            with path.open("rb") as file:
                header = json.loads(file.read(HEADER_BYTES))
            if (header["format_version"], header["key"]) != (FORMAT_VERSION, key):
                raise ValueError("it belongs to other data or to another version of this program")
            if path.stat().st_size != header["bytes"]:
                raise ValueError(
                    f"it has {path.stat().st_size} bytes where its header says {header['bytes']}"
                )
            self.values, self._header = header["values"], header
            self.arrays = {name: self._map(*place) for name, place in header["arrays"].items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} is damaged or outdated",
                str(error),
                "remove it: the next start writes it again",
                code="cached-file-damaged",
            ) from error

    def __reduce__(self) -> tuple[type[ArrayFile], tuple[Path, str]]:
        return ArrayFile, (self.path, self.key)

    def is_whole(self, progress: Callable[[], None] = lambda: None) -> bool:
        """Return True if header and arrays have the SHA-256 that was recorded when they were written."""
        header = {name: value for name, value in self._header.items() if name != "sha256"}
        return _digest(header, self.path, progress) == self._header["sha256"]

    def _map(self, fields: list[list[str]], count: int, start: int) -> np.ndarray:
        kind = np.dtype([(name, code) for name, code in fields])
        if not count:
            return np.zeros(0, kind)
        return np.memmap(self.path, kind, mode="r", offset=start, shape=(count,)).view(np.ndarray)


class ArrayFileWriter:
    """Writes an ArrayFile, in a `with` block; without `finish` it leaves no file."""

    def __init__(self, path: Path, key: str, kinds: Mapping[str, np.dtype]):
        """Begin a file with arrays of these structured types. Raises DataError if the folder is read-only."""
        self._path, self._key, self._kinds = path, key, kinds
        self._counts = dict.fromkeys(kinds, 0)
        self._draft = Path(draft_name(str(path)))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_left_behind(str(path))
            with ExitStack() as stack:
                self._files = {name: stack.enter_context(self._part(name).open("w+b")) for name in kinds}
                self._stack = stack.pop_all()
        except OSError as error:
            raise self._not_writable(error) from error

    def __enter__(self) -> ArrayFileWriter:
        return self

    def append(self, name: str, records: np.ndarray) -> None:
        """Add records to an array."""
        assert records.dtype == self._kinds[name]
        self._counts[name] += len(records)
        try:
            self._files[name].write(records)
        except OSError as error:
            raise self._not_writable(error) from error

    def finish(self, values: Mapping[str, object], progress: Callable[[], None] = lambda: None) -> None:
        """Join the arrays behind the header, and give the file its name. `progress` may raise."""
        try:
            arrays = {}
            with self._draft.open("w+b") as whole:
                whole.seek(HEADER_BYTES)
                for name, file in self._files.items():
                    arrays[name] = self._kinds[name].descr, self._counts[name], whole.tell()
                    file.seek(0)
                    while block := file.read(BLOCK_BYTES):
                        whole.write(block)
                        progress()
                size = whole.tell()
                whole.flush()
                header = {"format_version": FORMAT_VERSION, "key": self._key, "bytes": size, "arrays": arrays}
                header = json.loads(json.dumps(header | {"values": values}))
                header["sha256"] = _digest(header, self._draft, progress)
                whole.seek(0)
                whole.write(json.dumps(header).encode().ljust(HEADER_BYTES))
                whole.flush()
                os.fsync(whole.fileno())
            self._draft.replace(self._path)
        except OSError as error:
            raise self._not_writable(error) from error

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._stack.close()
        for path in (self._draft, *map(self._part, self._kinds)):
            path.unlink(missing_ok=True)

    def _part(self, name: str) -> Path:
        return Path(f"{self._draft}.{name}")

    def _not_writable(self, error: OSError) -> DataError:
        return DataError(
            f"{self._path} cannot be written",
            str(error),
            "name a folder with free space that rank 0 can write and all processes can read: "
            "--data-cache-path",
            code="data-not-writable",
        )


def _digest(header: Mapping[str, object], path: Path, progress: Callable[[], None]) -> str:
    """Return the SHA-256 over a header without this value, and the rest of the file."""
    content = [json.dumps(header, sort_keys=True), sha256_of_file(path, progress, HEADER_BYTES)]
    return hashlib.sha256("".join(content).encode()).hexdigest()
