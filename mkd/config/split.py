"""The setting `split`, Megatron's `99,1,0`: how documents are shared among training, validation and test."""

from __future__ import annotations

import math
from typing import NamedTuple

from mkd.errors import UsageError

EXAMPLE_SPLIT = "99,1,0"  # holds one document in a hundred out


class Split(NamedTuple):
    """Shares of the documents, in any scale."""

    training: float
    validation: float
    test: float

    @property
    def ends(self) -> tuple[float, float]:
        """(end of training, end of validation) as fractions of the documents; the rest is test."""
        total = sum(self)
        return self.training / total, (self.training + self.validation) / total


def parse_split(split: str) -> Split:
    """Read the shares of training, validation and test; missing ones are 0. Raises UsageError."""
    try:
        parts = [float(part) for part in split.split(",")]
    except ValueError:
        parts = []
    if len(parts) > 3 or not all(0 <= part < math.inf for part in parts) or not sum(parts):
        what = f"--split {split} is not a split"
        why = "it has up to three non-negative numbers, for training, validation and test, that are not all 0"
        raise UsageError(what, why, f"use for example --split {EXAMPLE_SPLIT}", code="value-not-valid")
    return Split(*parts, *[0.0] * (3 - len(parts)))
