"""A documented field of the schema. Its flag and its YAML key share its help text."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, help: str, *, choices: tuple[str, ...] | None = None, flag: bool = True) -> Any:
    """Return a documented dataclass field; without `flag` it is YAML only."""
    return field(default=default, metadata=dict(help=help, choices=choices, flag=flag))
