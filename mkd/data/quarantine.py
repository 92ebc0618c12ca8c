"""Bad records: left out of a corpus up to a limit, and written down with their place; the rest of the data is intact."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from mkd.errors import DataError, ErrorList, MkdError

MAX_REPORTED_ERRORS = 10
SHOWN_CHARACTERS = 80  # of a bad record, enough to find it by


class BadRecord(DataError):
    """One record that cannot become a document; `entry` is its line in a quarantine file."""

    def __init__(self, what: str, why: str = "", do: str = "", entry: Mapping | None = None, *, code: str):
        super().__init__(what, why, do, code=code)
        self.entry = dict(entry or {})

    @classmethod
    def at(cls, path: str, line: int, row: object, error: DataError) -> BadRecord:
        """What is wrong (`error`) with the raw record `row`, bytes or a row of a table, in `line` of the file at `path`."""
        start = (
            row[: 4 * SHOWN_CHARACTERS].decode("utf-8", "backslashreplace")
            if isinstance(row, bytes)
            else _shown(row)
        )
        entry = {"file": path, "line": line, "reason": error.what, "start": start[:SHOWN_CHARACTERS]}
        return cls(f"{path}:{line}: {error.what}", error.why, error.do, entry, code=error.code)

    @classmethod
    def of_entry(cls, entry: Mapping) -> BadRecord:
        return cls(f"{entry['file']}:{entry['line']}: {entry['reason']}", entry=entry, code="bad-record")

    def of_teacher(self, name: str) -> BadRecord:
        """The same of the record in a teacher's tokens."""
        return BadRecord(
            f"{name}: {self.what}", self.why, self.do, {**self.entry, "teacher": name}, code=self.code
        )


class Quarantine:
    """The bad records of one corpus while it is built. The file appears with the first of them."""

    def __init__(self, path: Path, max_bad_records: int):
        self._path, self._limit = path, max_bad_records
        self._first: list[MkdError] = []
        self._unreadable = False
        self.count = 0

    def add(self, errors: Sequence[MkdError]) -> None:
        """Take what is wrong with the next records. An error that is no BadRecord, of a whole file, is never accepted."""
        if not errors:
            return
        records = [error for error in errors if isinstance(error, BadRecord)]
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record.entry) + "\n" for record in records)
        self.count += len(records)
        self._unreadable |= len(records) < len(errors)
        self._first += errors[: MAX_REPORTED_ERRORS - len(self._first)]

    @property
    def is_over(self) -> bool:
        """Whether the corpus is refused; what is read on is for further errors only."""
        return self._unreadable or self.count > self._limit

    @property
    def is_full(self) -> bool:
        """Whether there is no use in reading on."""
        return self.is_over and len(self._first) >= MAX_REPORTED_ERRORS

    def close(self) -> None:
        """Raises DataError, or ErrorList with the first ten, when there were more bad records than are allowed."""
        if self.is_over:
            raise _too_many(self._first, self.count, self._limit, self.is_full)


def require_few(path: Path, count: int, max_bad_records: int) -> None:
    """Raises what a build would have raised for a finished corpus with `count` bad records in the quarantine file `path`."""
    if count > max_bad_records:
        raise _too_many(first_of(path), count, max_bad_records, stopped=False)


def first_of(path: Path) -> list[BadRecord]:
    """The first ten records of a quarantine file; none where there is no file."""
    with suppress(FileNotFoundError), path.open(encoding="utf-8") as file:
        return [BadRecord.of_entry(json.loads(line)) for line in islice(file, MAX_REPORTED_ERRORS)]
    return []


def collect(paths: Iterable[Path], target: Path) -> int:
    """Join the quarantine files that exist to `target`; without any bad record there is none. The number of records."""
    lines = [
        line for path in paths if path.exists() for line in path.read_text(encoding="utf-8").splitlines()
    ]
    target.unlink(missing_ok=True)
    if lines:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


def _too_many(first: Sequence[MkdError], count: int, limit: int, stopped: bool) -> MkdError:
    if len(first) == 1:
        (error,) = first
        if isinstance(error, BadRecord):
            error.do = f"{error.do or 'repair or remove it'}; or leave it out: --max-bad-records 1"
        return error
    reading = ", where reading stopped" if stopped else ""
    total = DataError(
        f"{count} bad records{reading}: more than --max-bad-records {limit}",
        "a corpus with holes is trained on only when that is wanted",
        "repair the records, or raise --max-bad-records to leave them out",
        code="too-many-bad-records",
    )
    return ErrorList([*first, total] if count else list(first))


def _shown(row: object) -> str:
    """The values of a table's row that are given, as JSON as far as they are JSON."""
    if not isinstance(row, Mapping):
        return ""
    return json.dumps({key: value for key, value in row.items() if value is not None}, default=repr)
