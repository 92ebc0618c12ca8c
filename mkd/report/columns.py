"""Keep the records of a run as columns, and thin them out to the points of a plot."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mkd.log.records import TRAIN, split_of

AXES = ("iteration", "consumed_tokens")
NOT_DRAWN = frozenset({*AXES, "split", "consumed_samples", "consumed_prompts"})
DIGITS = 6  # significant digits of a plotted value


@dataclass(frozen=True)
class Split:
    """The records of one split by rising iteration; of records of the same iteration the last one counts.

    Columns are fp64 [records], NaN where a record has no number.
    """

    columns: Mapping[str, np.ndarray]
    num_repeated: int = 0  # records that a later one of the same iteration replaces

    @property
    def iterations(self) -> np.ndarray:
        """The iteration of each record, fp64 [records]."""
        return self.columns["iteration"]

    @property
    def keys(self) -> list[str]:
        """Keys to draw: those with a finite number in some record."""
        return [key for key, one in self.columns.items() if key not in NOT_DRAWN and np.isfinite(one).any()]

    def points(self, key: str) -> list[tuple[int, float]]:
        """Return (iteration, value) of every finite value."""
        values = self.columns.get(key)
        if values is None:
            return []
        finite = np.isfinite(values)
        pairs = zip(self.iterations[finite].tolist(), values[finite].tolist(), strict=True)
        return [(int(iteration), value) for iteration, value in pairs]


def split_columns(records: Iterable[Mapping[str, Any]]) -> dict[str, Split]:
    """Return the columns of each split, training first."""
    found: dict[str, dict[str, list[float]]] = {}
    sizes: dict[str, int] = {}
    for record in records:
        split = split_of(dict(record)) if "split" in record else TRAIN
        columns, size = found.setdefault(split, {}), sizes.get(split, 0)
        for key, value in record.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                column = columns.setdefault(key, [])
                column.extend([math.nan] * (size - len(column)))
                column.append(_number(value))
        sizes[split] = size + 1
    for split, columns in found.items():
        for column in columns.values():
            column.extend([math.nan] * (sizes[split] - len(column)))
    return {split: _sorted(found[split]) for split in sorted(found, key=_order)}


def _number(value: float) -> float:
    """Return a float; NaN, which is a gap in a curve, for a whole number beyond its range."""
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _order(split: str) -> tuple[bool, bool, str]:
    """Order splits: training, held-out text, held-out tasks."""
    return split != TRAIN, split == "tasks", split


def _sorted(columns: Mapping[str, list[float]]) -> Split:
    arrays = {key: np.asarray(column) for key, column in columns.items()}
    iterations = arrays["iteration"]
    # np.unique keeps the first of equal values, so it sees the last record first.
    _, first = np.unique(iterations[::-1], return_index=True)
    kept = len(iterations) - 1 - first
    return Split({key: column[kept] for key, column in arrays.items()}, len(iterations) - len(kept))


def plot_data(split: Split, max_points: int) -> dict[str, Any]:
    """Return the points of a split as JSON values.

    `x` has a list for each axis, `series` a list of values for each key. If there are more records than
    `max_points`, a value is the mean of `bucket` records, and `low` and `high` have their extremes.
    """
    size = len(split.iterations)
    bucket = -(-size // max_points)
    starts = np.arange(0, size, bucket)
    last = np.minimum(starts + bucket, size) - 1
    found: dict[str, Any] = {"bucket": bucket, "x": {}, "series": {}}
    for axis in AXES:
        column = split.columns.get(axis)
        if column is not None and np.isfinite(column).all():
            found["x"][axis] = [int(value) for value in column[last]]
    if bucket > 1:
        found |= {"low": {}, "high": {}}
    for key in split.keys:
        values = split.columns[key]
        if bucket == 1:
            found["series"][key] = _json_values(values)
        else:
            for name, part in zip(("series", "low", "high"), _buckets(values, starts, bucket), strict=True):
                found[name][key] = _json_values(part)
    return found


def _buckets(values: np.ndarray, starts: np.ndarray, bucket: int) -> tuple[np.ndarray, ...]:
    """Return mean, minimum and maximum of the finite values of each bucket; NaN for a bucket without any."""
    padded = np.full(len(starts) * bucket, np.nan)
    padded[: len(values)] = np.where(np.isfinite(values), values, np.nan)
    rows = padded.reshape(len(starts), bucket)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # buckets without a value
        return np.nanmean(rows, axis=1), np.nanmin(rows, axis=1), np.nanmax(rows, axis=1)


def _json_values(values: np.ndarray) -> list[float | int | None]:
    """Round to `DIGITS` significant digits; None where there is no finite number."""
    return [_short(value) if math.isfinite(value) else None for value in values.tolist()]


def _short(value: float) -> float | int:
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short
