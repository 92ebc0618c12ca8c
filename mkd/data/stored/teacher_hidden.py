"""A teacher's final hidden states on disk, in their own precision, and its head beside them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mkd.data.corpus.known_files import sha256_of_file
from mkd.data.stored.cache_files import CachePart, ShardWriter, damaged
from mkd.data.stored.cache_meta import HiddenMeta
from mkd.data.stored.teacher_rows import StoredStates
from mkd.errors import DataError

if TYPE_CHECKING:
    from pyarrow import Table

# File in the format of safetensors, and the tensor [v, h] in it. The folder is not that of a model.
HEAD_FILE, HEAD = "head.tensor", "head"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class HiddenWriter(ShardWriter):
    """Writes the states of packs, each [n, bytes] uint8. They look random: compression would save little."""

    options: ClassVar[dict[str, Any]] = {"compression": "none", "write_statistics": False}
    _meta: HiddenMeta

    def _types(self, pa: ModuleType) -> dict[str, Any]:
        return {"states": pa.list_(pa.binary(self._meta.row_bytes))}  # [n]

    def _row(self, *columns: np.ndarray) -> dict[str, Any]:
        (states,) = columns
        return {"states": states}

    def _array(self, name: str, values: list[np.ndarray]) -> Any:
        if name != "states":
            return super()._array(name, values)
        whole = np.ascontiguousarray(np.concatenate(values))
        borders = np.cumsum([0, *map(len, values)]).astype(np.int32)
        rows = self._pa.FixedSizeBinaryArray.from_buffers(
            self._pa.binary(self._meta.row_bytes), len(whole), [None, self._pa.py_buffer(whole)]
        )
        return self._pa.ListArray.from_arrays(self._pa.array(borders), rows)


class HiddenPart(CachePart):
    """The states for one data set."""

    meta: HiddenMeta

    def __init__(self, folder: Path, part: str, meta: HiddenMeta, is_read: bool = True):
        """See `CachePart`. Unless `is_read`, packs are compared with those of the export and have no states.

        Only the last pipeline stage needs them.
        """
        super().__init__(folder, part, meta)
        self._is_read = is_read

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder, self.part, self.meta, self._is_read)

    @property
    def _columns(self) -> list[str] | None:
        return None if self._is_read else ["sample_id", "digest"]

    def _decoded(self, table: Table, place: int) -> StoredStates:
        if not self._is_read:
            return self.empty()
        rows, width = table["states"][place].values, self.meta.row_bytes
        numbers = np.frombuffer(rows.buffers()[1], np.uint8, len(rows) * width, rows.offset * width)
        states = torch.from_numpy(numbers.copy()).view(DTYPES[self.meta.states_dtype])
        return StoredStates(states.view(-1, self.meta.hidden_size), self._is_read)

    def empty(self) -> StoredStates:
        states = torch.empty(0, self.meta.hidden_size, dtype=DTYPES[self.meta.states_dtype])
        return StoredStates(states, self._is_read)


def as_bytes(states: Tensor) -> np.ndarray:
    """Return states [n, h] as uint8 [n, bytes], on the CPU."""
    return states.contiguous().view(torch.uint8).cpu().numpy()


def write_head(folder: Path, weight: Tensor) -> str:
    """Write the head [v, h], whole or not at all, and return the SHA-256 of the file."""
    from safetensors.torch import save_file

    partial = folder / (HEAD_FILE + ".partial")
    partial.unlink(missing_ok=True)
    partial.touch()
    mode = partial.stat().st_mode  # follows the umask; safetensors makes files that only their owner may read
    save_file({HEAD: weight.contiguous()}, partial)
    partial.chmod(mode)
    digest = sha256_of_file(partial)
    partial.replace(folder / HEAD_FILE)
    return digest


def require_head(folder: Path, meta: HiddenMeta) -> None:
    """Raise DataError if the head in the folder is not the one of the export. Reads the file."""
    path = folder / HEAD_FILE
    if not meta.head_sha256 or not path.is_file():
        what = f"the teacher cache {folder} is incomplete"
        why = f"the teacher's head, {HEAD_FILE}, is missing: the export has not finished"
        do = f"start the same `{meta.command}` command again; it resumes where it stopped"
        raise DataError(what, why, do, code="teacher-cache-incomplete")
    if sha256_of_file(path) != meta.head_sha256:
        raise damaged(path, "its content is not that of the export")


def read_head_rows(folder: Path, first: int, rows: int, dtype: torch.dtype) -> Tensor:
    """Return `rows` rows of the head from `first` on, [rows, h]; those beyond the vocabulary are zeros."""
    from safetensors import safe_open

    with safe_open(folder / HEAD_FILE, framework="pt") as file:
        entry = file.get_slice(HEAD)
        count, width = entry.get_shape()
        found = entry[min(first, count) : min(first + rows, count)]
    whole = torch.zeros(rows, width, dtype=dtype)
    whole[: len(found)] = found
    return whole
