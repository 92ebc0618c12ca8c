"""A documented field of the schema. Its flag and its YAML key share its help text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Range:
    """The values that a number may have."""

    text: str  # completes "must be ..."
    holds: Callable[[float], bool]


ABOVE_0 = Range("above 0", lambda x: x > 0)
NOT_NEGATIVE = Range("0 or more", lambda x: x >= 0)


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    flag: bool = True,
    valid: Range | None = None,
    words: Mapping[str, int] = MappingProxyType({}),
) -> Any:
    """Return a documented dataclass field; without `flag` it is YAML only.

    A number is checked against `valid`. `words` may be written in its place; their numbers are outside of it.
    Ranges of earlier options stand in `mkd/plan/checks/ranges.py`.
    """
    metadata = dict(help=help, choices=choices, flag=flag, valid=valid, words=words)
    return field(default=default, metadata=metadata)
