"""A teacher's top-k log-probabilities on disk."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mkd.data.stored.cache_files import CachePart, ShardWriter
from mkd.data.stored.cache_meta import TopKMeta
from mkd.data.stored.teacher_rows import TeacherRows

if TYPE_CHECKING:
    from pyarrow import ChunkedArray, Table

DTYPES = {"float16": np.float16, "float32": np.float32}


class TopKWriter(ShardWriter):
    """Writes ids and log-probabilities, each [n, k], and metrics [n, 2] of packs."""

    _meta: TopKMeta

    def _types(self, pa: ModuleType) -> dict[str, Any]:
        return {
            "ids": pa.list_(pa.int32()),  # [n * k]
            "logprobs": pa.list_(pa.from_numpy_dtype(DTYPES[self._meta.logprob_dtype])),  # [n * k]
            # [n * 3]: logarithm of the top-k mass, cross entropy, entropy
            "statistics": pa.list_(pa.float32()),
        }

    def _encodings(self) -> dict[str, str]:
        """Store high and low bytes apart: the high bytes of neighbours are alike, which saves a fifth."""
        return {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in ("ids", "logprobs")}

    def _row(self, *columns: np.ndarray) -> dict[str, Any]:
        ids, logprobs, metrics = columns
        mass = np.exp(logprobs.astype(np.float64)).sum(axis=1, keepdims=True)
        statistics = np.concatenate([np.log(mass), metrics], axis=1).astype(np.float32)
        stored = logprobs.astype(DTYPES[self._meta.logprob_dtype])
        return dict(ids=ids.astype(np.int32).ravel(), logprobs=stored.ravel(), statistics=statistics.ravel())


class TopKPart(CachePart):
    """The predictions for one data set."""

    meta: TopKMeta

    def _decoded(self, table: Table, place: int) -> TeacherRows:
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

    def empty(self) -> TeacherRows:
        return TeacherRows.empty(self.meta.k, self.meta.vocab_size)


def _values(column: ChunkedArray, place: int) -> np.ndarray:
    """Return a copy of the numbers of one pack in a column of lists."""
    return np.array(column[place].values.to_numpy(zero_copy_only=False))
