"""The parts of records that the loss of a run reads, besides their texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from mkd.data.records.values import json_name
from mkd.errors import DataError

LARGEST, SMALLEST = 3e38, 1e-37  # sizes of a number, which becomes fp32


@dataclass(frozen=True)
class WantedRecords:
    """The records that the loss of a run learns from."""

    pairs: bool | None = None  # preference pairs: all records, or none of them; None: either
    numbers: tuple[str, ...] = ()
    """Keys of a number in each record, true or false included. Each is a row value of the packs."""
    weights: tuple[str, ...] = ()  # those of them that must be above 0

    @property
    def settings(self) -> list[list[str]]:
        """Keys that decide what is in a tokenised corpus, as JSON values."""
        return [list(keys) for keys in (self.numbers, self.weights) if keys]

    def __or__(self, other: WantedRecords) -> WantedRecords:
        """Return what either of them wants."""
        pairs = other.pairs if self.pairs is None else self.pairs
        numbers = dict.fromkeys((*self.numbers, *other.numbers))
        return WantedRecords(pairs, tuple(numbers), (*self.weights, *other.weights))

    def read_numbers(self, fields: Mapping[str, Any]) -> tuple[float, ...]:
        """Return the numbers of a raw record. Raises DataError for one that is missing or not valid.

        true is 1 and false is 0, but neither is a weight.
        """
        return tuple(_number(fields, key, key in self.weights) for key in self.numbers)


def _number(fields: Mapping[str, Any], key: str, is_weight: bool) -> float:
    value = fields.get(key)
    given = "missing or null" if value is None else f"a {json_name(value)}"
    if isinstance(value, int | float) and not (is_weight and isinstance(value, bool)):
        size = abs(value)
        if (value == 0 or SMALLEST <= size <= LARGEST) and (value > 0 or not is_weight):
            return float(value)
        given = f"{value}, more than {LARGEST:g}" if size > LARGEST else f"{value}, less than {SMALLEST:g}"
        given = "not a number (NaN)" if value != value else given
        given = f"{value}, not above 0" if is_weight and value <= 0 else given
    nearest = get_close_matches(key, [name for name in fields if name != key], 1) if value is None else []
    raise DataError(
        f"{key} is {given}",
        "it weighs the record in the loss" if is_weight else "the loss of this run reads a number there",
        f"give every record a number{' above 0' if is_weight else ''} there, or remove the record"
        + (f"; this record has {nearest[0]}" if nearest else ""),
        code="record-value-not-valid",
    )


ANY_RECORDS = WantedRecords()
