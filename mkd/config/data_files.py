"""The suffixes of files of records, and whether such a file is there."""

from __future__ import annotations

from pathlib import Path

from mkd.errors import DataError

JSON_SUFFIXES = (".jsonl", ".json")
ARROW_SUFFIXES = (".parquet", ".arrow")
TEXT_SUFFIX = ".txt"
RAW_SUFFIXES = (*JSON_SUFFIXES, *ARROW_SUFFIXES, TEXT_SUFFIX)


def require_file(path: str, flag: str) -> None:
    """Raise DataError if `path` is not a file."""
    if not Path(path).is_file():
        raise DataError(
            f"{flag} {path}: nothing found",
            "looked for a file of this name",
            "check the path",
            code="data-path-not-found",
        )
