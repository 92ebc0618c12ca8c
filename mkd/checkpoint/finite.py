"""Refuse weights that are NaN or infinite while they are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mkd.errors import CheckpointError


def is_finite(values: Tensor) -> bool:
    """Return True if no value is NaN or infinite.

    A sum is finite only if all its terms are, and it takes a twentieth of the time of `torch.isfinite`. If
    the sum overflows, check every value.
    """
    if not values.is_floating_point():
        return True
    total = values.sum(dtype=torch.float32 if values.dtype == torch.float16 else None)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(values).all())


def not_finite(place: str, tensor: str, values: Tensor) -> CheckpointError:
    """Return the error for a tensor of `place`, a file or a checkpoint, of which `values` were read."""
    count = int((~torch.isfinite(values)).sum())
    return CheckpointError(
        f"{place}: {count:,} of {values.numel():,} values of tensor {tensor} are NaN or infinite",
        "a model with such a weight computes NaN, or other results without a word",
        "download or convert the model again, or choose an earlier checkpoint of the run that wrote it",
        code="weights-not-finite",
    )


def first_not_finite(place: str, state: Any) -> CheckpointError | None:
    """Return the error for the first tensor in nested mappings and sequences that is not finite."""
    for name, values in _tensors(state, ""):
        if not is_finite(values):
            return not_finite(place, name, values)
    return None


def _tensors(state: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (name joined by dots, tensor) of everything below `state`."""
    if isinstance(state, Tensor):
        yield name, state
        return
    items: Any = ()
    if isinstance(state, Mapping):
        items = state.items()
    elif isinstance(state, Sequence) and not isinstance(state, str | bytes):
        items = enumerate(state)
    for key, one in items:
        yield from _tensors(one, f"{name}.{key}" if name else str(key))
