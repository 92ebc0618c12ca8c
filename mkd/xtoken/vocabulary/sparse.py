"""A sparse matrix by rows, such as the projection of one vocabulary on another.

A projection is 150,000 x 130,000 with few entries per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SparseMatrix:
    """Compressed sparse rows: row i has the entries [offsets[i], offsets[i + 1]).

    The columns of a row ascend and are distinct.
    """

    offsets: np.ndarray  # [rows + 1] int64
    columns: np.ndarray  # [entries] int64
    values: np.ndarray  # [entries] float32, positive
    num_columns: int

    @staticmethod
    def from_entries(
        rows: np.ndarray,  # [n] int
        columns: np.ndarray,  # [n] int
        values: np.ndarray,  # [n] float, positive
        shape: tuple[int, int],
    ) -> SparseMatrix:
        """Return the matrix with these entries, given in any order; values of the same cell are added."""
        cells = np.asarray(rows, np.int64) * shape[1] + np.asarray(columns, np.int64)
        order = np.argsort(cells, kind="stable")
        cells, first = np.unique(cells[order], return_index=True)
        sums = np.add.reduceat(np.asarray(values, np.float64)[order], first) if len(cells) else np.zeros(0)
        counts = np.bincount(cells // shape[1], minlength=shape[0])
        return SparseMatrix(_offsets(counts), cells % shape[1], sums.astype(np.float32), shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.offsets) - 1, self.num_columns

    @property
    def rows(self) -> np.ndarray:
        """Row of each entry, int64 [entries]."""
        return np.repeat(np.arange(self.shape[0]), np.diff(self.offsets))

    @property
    def empty_rows(self) -> np.ndarray:
        """Rows without an entry, int64, ascending."""
        return np.flatnonzero(np.diff(self.offsets) == 0)

    def row(self, index: int) -> dict[int, float]:
        """Return {column: value} of one row."""
        part = slice(self.offsets[index], self.offsets[index + 1])
        return dict(zip(self.columns[part].tolist(), self.values[part].tolist(), strict=True))

    def row_sums(self) -> np.ndarray:
        """Return the sum of each row, float64 [rows]; 0 for an empty row."""
        return np.bincount(self.rows, self.values.astype(np.float64), minlength=self.shape[0])

    def plus(self, other: SparseMatrix) -> SparseMatrix:
        """Return the sum of two matrices of the same shape."""
        assert self.shape == other.shape
        entries = zip(self._entries(), other._entries(), strict=True)
        return SparseMatrix.from_entries(*map(np.concatenate, entries), self.shape)

    def with_rows_of(self, other: SparseMatrix) -> SparseMatrix:
        """Return this matrix with each row replaced by that row of `other` unless the latter is empty."""
        assert self.shape == other.shape
        replaced = np.diff(other.offsets) > 0
        return self._keep(~replaced[self.rows]).plus(other)

    def top_k(self, k: int) -> SparseMatrix:
        """Keep the k largest entries of each row; among equal values those with the smallest columns."""
        rows = self.rows
        order = np.lexsort((self.columns, -self.values, rows))
        rank = np.arange(len(rows)) - self.offsets[rows]  # place of the sorted entry within its row
        kept = np.zeros(len(rows), bool)
        kept[order[rank < k]] = True
        return self._keep(kept)

    def normalised(self) -> SparseMatrix:
        """Divide every row that is not empty by its sum."""
        values = (self.values / self.row_sums()[self.rows]).astype(np.float32)
        return SparseMatrix(self.offsets, self.columns, values, self.num_columns)

    def _entries(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.rows, self.columns, self.values

    def _keep(self, mask: np.ndarray) -> SparseMatrix:
        counts = np.bincount(self.rows[mask], minlength=self.shape[0])
        return SparseMatrix(_offsets(counts), self.columns[mask], self.values[mask], self.num_columns)


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
