"""Sparse rows equal dense matrices."""

from __future__ import annotations

import numpy as np
import pytest

from mkd.xtoken.vocabulary.sparse import SparseMatrix

SHAPE = 40, 23


def random_matrix(seed: int, entries: int = 150) -> tuple[SparseMatrix, np.ndarray]:
    """Return a matrix with repeated cells, equal values and empty rows, and its dense form."""
    rng = np.random.default_rng(seed)
    rows, columns = rng.integers(0, SHAPE[0] - 5, entries), rng.integers(0, SHAPE[1], entries)
    values = rng.integers(1, 5, entries).astype(np.float32)
    dense = np.zeros(SHAPE)
    np.add.at(dense, (rows, columns), values)
    return SparseMatrix.from_entries(rows, columns, values, SHAPE), dense


def dense_of(matrix: SparseMatrix) -> np.ndarray:
    dense = np.zeros(matrix.shape)
    assert len(np.unique(matrix.rows * matrix.num_columns + matrix.columns)) == len(matrix.columns)
    dense[matrix.rows, matrix.columns] = matrix.values
    return dense


@pytest.mark.parametrize("seed", range(4))
def test_operations_equal_dense_ones(seed):
    matrix, dense = random_matrix(seed)
    other, other_dense = random_matrix(seed + 100, entries=12)
    assert matrix.shape == SHAPE and (np.diff(matrix.columns)[np.diff(matrix.rows) == 0] > 0).all()
    np.testing.assert_array_equal(dense_of(matrix), dense)
    np.testing.assert_array_equal(dense_of(matrix.plus(other)), dense + other_dense)
    np.testing.assert_array_equal(matrix.row_sums(), dense.sum(1))
    np.testing.assert_array_equal(matrix.empty_rows, np.flatnonzero(~dense.any(1)))
    replaced = np.where(other_dense.any(1, keepdims=True), other_dense, dense)
    np.testing.assert_array_equal(dense_of(matrix.with_rows_of(other)), replaced)
    sums = np.maximum(dense.sum(1, keepdims=True), 1)
    np.testing.assert_allclose(dense_of(matrix.normalised()), dense / sums, rtol=1e-6)
    filled = np.flatnonzero(dense.any(1))[0]
    assert matrix.row(filled) == {c: v for c, v in enumerate(dense[filled]) if v}


@pytest.mark.parametrize("k", [1, 3, SHAPE[1]])
def test_top_k_keeps_the_largest_and_of_equals_the_first(k):
    matrix, dense = random_matrix(7)
    expected = np.zeros_like(dense)
    for row, values in enumerate(dense):
        kept = sorted(range(len(values)), key=lambda c: (-values[c], c))[:k]
        expected[row, kept] = values[kept]
    np.testing.assert_array_equal(dense_of(matrix.top_k(k)), expected)


def test_a_matrix_without_entries():
    matrix = SparseMatrix.from_entries([], [], [], (3, 2))
    assert len(matrix.top_k(2).normalised().empty_rows) == 3
    assert matrix.plus(matrix).shape == (3, 2) and not matrix.row_sums().any()
