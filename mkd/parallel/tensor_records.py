"""Apply a function to every tensor of a record: a copy to a device, pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


def map_tensors(record: T, change: Callable[[Tensor], Tensor]) -> T:
    """Return a copy of a dataclass with `change` applied to every tensor in it.

    It is also applied in dataclasses, tuples and mappings among its fields.
    """
    return _changed(record, change)


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{one.name: _changed(getattr(value, one.name), change) for one in fields(value)}
        )
    if type(value) is tuple:
        return tuple(_changed(one, change) for one in value)
    if isinstance(value, Mapping):
        return {key: _changed(one, change) for key, one in value.items()}
    return value
