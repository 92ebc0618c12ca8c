"""Read metrics.jsonl back."""

from __future__ import annotations

import json
from pathlib import Path

from mkd.errors import DataError

TRAIN = "train"


def read_records(run: str | Path) -> list[dict]:
    """Return the records of a run, given its metrics.jsonl or the folder that holds it; [] if nothing is
    written yet.

    An unfinished last line, which a run may be writing now, is skipped. Raises DataError for a file that
    cannot be read, or that has a line that is not a record.
    """
    path = Path(run)
    path = path / "metrics.jsonl" if path.is_dir() else path
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror}"
        raise DataError(what, "", "name the log folder of a run, or its metrics.jsonl") from error
    return [_record(path, number, line) for number, line in enumerate(lines, 1)]


def split_of(record: dict) -> str:
    """Return `train`, or the split of an evaluation record."""
    return record.get("split", TRAIN)


def curve(records: list[dict], split: str, key: str) -> dict[int, float]:
    """Return iteration -> value of one key; steps without a value are absent."""
    return {
        record["iteration"]: record[key]
        for record in records
        if split_of(record) == split and isinstance(record.get(key), (int, float))
    }


def _record(path: Path, number: int, line: bytes) -> dict:
    try:
        record = json.loads(line)
        if isinstance(record["iteration"], int) and isinstance(split_of(record), str):
            return record
    except (ValueError, KeyError, TypeError):
        pass
    what = f"{path}:{number}: not a metrics record"
    raise DataError(what, "each line is a JSON object with its iteration", "remove the line")
