"""The parts of records that the loss of a run reads, besides their texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from mkd.data.records.values import json_name
from mkd.errors import DataError

LARGEST, SMALLEST = 3e38, 1e-37  # sizes of a number, which becomes fp32
LONGEST_TAG = 100  # characters
SHOWN = 60  # characters of a value in an error


@dataclass(frozen=True)
class WantedRecords:
    """The records that the loss of a run learns from."""

    pairs: bool | None = None  # preference pairs: all records, or none of them; None: either
    numbers: tuple[str, ...] = ()
    """Keys of a number in each record, true or false included. Each is a row value of the packs."""
    weights: tuple[str, ...] = ()  # those of them that must be above 0
    tag: str | None = None  # key of a record's tag; None: tags are not read
    context: tuple[str, ...] = ()  # keys that teachers with contexts read; their values may be missing

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that are read besides those of the texts."""
        tag = () if self.tag is None else (self.tag,)
        return (*self.numbers, *tag, *self.context)

    @property
    def settings(self) -> list[list[str]]:
        """Keys that decide what is in a tokenised corpus, as JSON values."""
        found = [list(keys) for keys in (self.numbers, self.weights) if keys]
        found += [] if self.tag is None else [["tag key", self.tag]]
        return [*found, ["context", *self.context]] if self.context else found

    def __or__(self, other: WantedRecords) -> WantedRecords:
        """Return what either of them wants."""
        pairs = other.pairs if self.pairs is None else self.pairs
        numbers = dict.fromkeys((*self.numbers, *other.numbers))
        context = tuple(dict.fromkeys((*self.context, *other.context)))
        weights = (*self.weights, *other.weights)
        return WantedRecords(pairs, tuple(numbers), weights, self.tag or other.tag, context)

    def read_numbers(self, fields: Mapping[str, Any]) -> tuple[float, ...]:
        """Return the numbers of a raw record. Raises DataError for one that is missing or not valid.

        true is 1 and false is 0, but neither is a weight.
        """
        return tuple(_number(fields, key, key in self.weights) for key in self.numbers)

    def read_tag(self, fields: Mapping[str, Any]) -> str:
        """Return the tag of a raw record; "" without one. Raises DataError for a value that is none."""
        value = None if self.tag is None else fields.get(self.tag)
        if value is None:
            return ""
        tag = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
        if not is_tag(tag):
            raise DataError(
                f"{self.tag} is {repr(value)[:SHOWN] if isinstance(value, str) else f'a {json_name(value)}'}",
                "it is the tag of the record, which becomes part of the names of metrics",
                f"give a tag of 1 to {LONGEST_TAG} letters without blanks, or remove the key",
                code="record-value-not-valid",
            )
        return tag


def is_tag(text: str) -> bool:
    """Return True if a text can be a tag: part of the name of a metric."""
    return 0 < len(text) <= LONGEST_TAG and text.isprintable() and " " not in text and "=" not in text


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
