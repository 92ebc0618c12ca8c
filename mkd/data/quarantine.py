"""Bad records: skipped up to a limit and listed with their place; the rest of the data is unchanged."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path

from mkd.errors import DataError, ErrorList, MkdError
from mkd.human import counted

MAX_REPORTED_ERRORS = 10
SHOWN_CHARACTERS = 80  # of a bad record, enough to find it


class BadRecord(DataError):
    """One record that cannot become a document; `entry` is its line in a quarantine file."""

    def __init__(self, what: str, why: str = "", do: str = "", entry: Mapping | None = None, *, code: str):
        super().__init__(what, why, do, code=code)
        self.entry = dict(entry or {})

    @classmethod
    def from_row(cls, path: str, line: int, row: object, error: DataError) -> BadRecord:
        """Return `error` of the raw record `row` (bytes, or a row of a table) with its place.

        The place is `line` of the file `path`.
        """
        start = (
            row[: 4 * SHOWN_CHARACTERS].decode("utf-8", "backslashreplace")
            if isinstance(row, bytes)
            else _shown(row)
        )
        entry = {"file": path, "line": line, "reason": error.what, "start": start[:SHOWN_CHARACTERS]}
        return cls(f"{path}:{line}: {error.what}", error.why, error.do, entry, code=error.code)

    @classmethod
    def from_entry(cls, entry: Mapping) -> BadRecord:
        """Return the bad record that a line of a quarantine file describes."""
        return cls(f"{entry['file']}:{entry['line']}: {entry['reason']}", entry=entry, code="bad-record")

    def for_teacher(self, name: str) -> BadRecord:
        """Return the same error, marked as found while the record was aligned with the teacher `name`."""
        return BadRecord(
            f"{name}: {self.what}", self.why, self.do, {**self.entry, "teacher": name}, code=self.code
        )


def skipped(num_bad_records: int, quarantine: str = "") -> str:
    """Return "2 bad records skipped", with the file that lists them if it is given; "" without any."""
    listed = f", listed in {quarantine}" if quarantine else ""
    return f"{counted(num_bad_records, 'bad record')} skipped{listed}" if num_bad_records else ""


class Quarantine:
    """The bad records of one corpus while it is built. The file is created with the first one.

    Each source file may have `max_bad_records`.
    """

    def __init__(self, path: Path, max_bad_records: int):
        self._path, self._limit = path, max_bad_records
        self._first: list[MkdError] = []
        self._unreadable = False
        self._of_files = Counter[str]()

    def add(self, errors: Sequence[MkdError]) -> None:
        """Add the errors of the next records.

        An error other than BadRecord, such as an unreadable file, is never allowed.
        """
        if not errors:
            return
        records = [error for error in errors if isinstance(error, BadRecord)]
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record.entry) + "\n" for record in records)
        self._of_files.update(record.entry["file"] for record in records)
        self._unreadable |= len(records) < len(errors)
        self._first += errors[: MAX_REPORTED_ERRORS - len(self._first)]

    @property
    def count(self) -> int:
        """Number of bad records."""
        return self._of_files.total()

    @property
    def is_over(self) -> bool:
        """True if the corpus is refused; reading continues only to collect further errors."""
        return self._unreadable or max(self._of_files.values(), default=0) > self._limit

    @property
    def is_full(self) -> bool:
        """True if enough errors of a refused corpus are collected, so that reading can stop."""
        return self.is_over and len(self._first) >= MAX_REPORTED_ERRORS

    def close(self) -> None:
        """Raise the errors if there were more bad records than allowed.

        Raises DataError, or ErrorList with the first ten errors.
        """
        if self.is_over:
            most = max(self._of_files.values(), default=0)
            raise too_many(self._first, most, self._limit, self.is_full)


def require_few(path: Path, max_bad_records: int) -> None:
    """Raise the error of a build if some file of a finished corpus has more bad records than allowed.

    `path` is the corpus's quarantine file.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        most = max(Counter(json.loads(line)["file"] for line in file).values(), default=0)
    if most > max_bad_records:
        raise too_many(first_of(path), most, max_bad_records, stopped=False)


def first_of(path: Path) -> list[BadRecord]:
    """Return the first ten records of a quarantine file; an empty list if the file does not exist."""
    with suppress(FileNotFoundError), path.open(encoding="utf-8") as file:
        return [BadRecord.from_entry(json.loads(line)) for line in islice(file, MAX_REPORTED_ERRORS)]
    return []


def collect(paths: Iterable[Path], target: Path) -> int:
    """Write the lines of all existing quarantine files to `target` and return their number.

    If there is no record, write no file.
    """
    lines = [
        line for path in paths if path.exists() for line in path.read_text(encoding="utf-8").splitlines()
    ]
    target.unlink(missing_ok=True)
    if lines:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


def list_left_out(records: Iterable[tuple[str, int, str]], target: Path) -> None:
    """Add (file, line, why) of good records that are left out to a list of bad records."""
    append(({"file": path, "line": line, "reason": why} for path, line, why in records), target)


def append(entries: Iterable[Mapping], target: Path) -> None:
    """Add entries to a list of bad records. Without any, write no file."""
    lines = (json.dumps(entry) + "\n" for entry in entries)
    if (first := next(lines, None)) is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a", encoding="utf-8") as file:
            file.writelines(chain([first], lines))


def too_many(first: Sequence[MkdError], count: int, limit: int, stopped: bool) -> MkdError:
    """Return the error of a corpus with `count` bad records, the `first` of them known."""
    if len(first) == 1:
        (error,) = first
        if isinstance(error, BadRecord):
            error.do = f"{error.do or 'repair or remove it'}; or leave it out: --max-bad-records 1"
        return error
    reading = ", where reading stopped" if stopped else ""
    total = DataError(
        f"{count} bad records{reading}: more than --max-bad-records {limit}",
        "mkd trains on a corpus with records missing only if asked to",
        "repair the records, or raise --max-bad-records, a number for each file, to skip them",
        code="too-many-bad-records",
    )
    return ErrorList([*first, total] if count else list(first))


def _shown(row: object) -> str:
    """Return the values of a table's row that are not None as JSON; other types as their repr."""
    if not isinstance(row, Mapping):
        return ""
    return json.dumps({key: value for key, value in row.items() if value is not None}, default=repr)
