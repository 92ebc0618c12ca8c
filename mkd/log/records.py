"""Read metrics.jsonl back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkd.errors import DataError

TRAIN = "train"


def read_records(run: str | Path) -> list[dict[str, Any]]:
    """Return the records of a run, [] if there is none yet; see `each_record`."""
    return list(each_record(run))


def each_record(run: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a run, given its metrics.jsonl or the folder that holds it.

    An unfinished last line, which a running run is still writing, is left out. Raises DataError for a file
    that cannot be read, or for a line that is not a record.
    """
    path = Path(run)
    path = path / "metrics.jsonl" if path.is_dir() else path
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield _record(path, number, line)
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror}"
        do = "name the log folder of a run, or its metrics.jsonl"
        raise DataError(what, "", do, code="metrics-unreadable") from error


def split_of(record: dict[str, Any]) -> str:
    """Return `train`, or the split that an evaluation record names."""
    return record.get("split", TRAIN)


def curve(records: list[dict[str, Any]], split: str, key: str) -> dict[int, float]:
    """Return iteration -> value of one key, without the steps that have no value."""
    of_split = (record for record in records if split_of(record) == split)
    return {one["iteration"]: one[key] for one in of_split if isinstance(one.get(key), (int, float))}


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if isinstance(record["iteration"], int) and isinstance(split_of(record), str):
            return record
    except (ValueError, KeyError, TypeError):
        pass
    what = f"{path}:{number}: not a metrics record"
    why = "each line is a JSON object with its iteration"
    raise DataError(what, why, "remove the line", code="metrics-unreadable")
