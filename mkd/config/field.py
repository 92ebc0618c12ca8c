"""A documented field of the schema. Its flag and its YAML key share its help text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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
) -> Any:
    """Return a documented dataclass field; without `flag` it is YAML only.

    A number is checked against `valid`. Ranges of earlier options stand in `mkd/plan/checks/ranges.py`.
    """
    return field(default=default, metadata=dict(help=help, choices=choices, flag=flag, valid=valid))
