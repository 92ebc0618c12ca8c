"""Projection matrices in the dense top-k form that other engines publish."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import torch
from safetensors.torch import load_file

from mkd.errors import UsageError
from mkd.xtoken.vocabulary.sparse import SparseMatrix

INDICES, LIKELIHOODS = "indices", "likelihoods"


def load_published(path: Path, student_size: int, teacher_size: int) -> SparseMatrix:
    """Load the matrix in a `.pt`, `.safetensors` or `.npz` file of `indices` and `likelihoods`.

    Both are [rows, k]. Row i holds teacher ids and their weights for student token i; weights of 0 and
    negative ids fill short rows. Rows beyond the ids of the student's tokenizer are skipped, because models
    are wider than tokenizers. Each row is divided by its sum. Raises UsageError for a file of another form or
    for other vocabularies.
    """
    indices, likelihoods = _read(path)
    if indices.shape != likelihoods.shape or indices.ndim != 2:
        found = indices.shape, likelihoods.shape
        raise _refused(path, f"indices {found[0]} and likelihoods {found[1]} do not share a shape [rows, k]")
    if len(indices) < student_size:
        rows = len(indices)
        raise _refused(path, f"it has {rows} rows, and the student's tokenizer has {student_size} ids")
    indices, likelihoods = indices[:student_size], likelihoods[:student_size]
    if not np.isfinite(likelihoods).all() or (likelihoods < 0).any():
        raise _refused(path, "its likelihoods are not all finite and positive")
    used = (likelihoods > 0) & (indices >= 0)
    if used.any() and indices[used].max() >= teacher_size:
        largest = indices[used].max()
        raise _refused(path, f"it names teacher id {largest}, and the teacher's has {teacher_size} ids")
    rows, shape = np.nonzero(used)[0], (student_size, teacher_size)
    return SparseMatrix.from_entries(rows, indices[used], likelihoods[used], shape).normalised()


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return (indices int64, likelihoods float64)."""
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: torch.from_numpy(file[name]) for name in (INDICES, LIKELIHOODS)}
        elif path.suffix == ".safetensors":
            arrays = load_file(path)
        else:
            arrays = torch.load(path, map_location="cpu", weights_only=True)
        return arrays[INDICES].to(torch.int64).numpy(), arrays[LIKELIHOODS].to(torch.float64).numpy()
    except Exception as error:  # each of the three libraries raises other errors
        raise _refused(path, _reason(error)) from error


def _reason(error: Exception) -> str:
    if isinstance(error, UnpicklingError):  # torch's message advises to load it anyway
        return "it holds objects other than tensors, which mkd does not load because they could run code"
    return f"{type(error).__name__}: {(str(error).strip() or 'no more is known').splitlines()[0]}"


def _refused(path: Path, why: str) -> UsageError:
    return UsageError(
        f"{path} is not a projection matrix for these tokenizers",
        why,
        "build one with `mkd projection` from this run's tokenizers, or drop the setting: mkd then builds it",
        code="projection-does-not-fit",
    )
