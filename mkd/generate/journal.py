"""Completions on disk while a job runs: a line each, so that a kill loses none that is finished.

Each process appends to a file of its own. A line has a hash. The last line of a killed process may be torn:
it is cut off when the job resumes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from mkd.errors import DataError
from mkd.generate.completions import Completion

PATTERN = "completions_*.lines"
HASH_CHARACTERS = 16


class Journal:
    """The file of one process, which appends to it. Written by one thread at a time."""

    def __init__(self, folder: Path, rank: int):
        self._file = (folder / f"completions_{rank:05d}.lines").open("ab")

    def add(self, completion: Completion) -> None:
        """Write a completion. It survives the end of this process from here on."""
        content = json.dumps(asdict(completion), ensure_ascii=False)
        self._file.write(f"{_hash(content)} {content}\n".encode("utf-8", "surrogatepass"))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def journals(folder: Path) -> list[Path]:
    """Return the files of all processes, in order."""
    return sorted(folder.glob(PATTERN))


def cut_torn_lines(folder: Path) -> None:
    """Cut off the lines that processes had not finished. No process may be writing."""
    for path in journals(folder):
        with path.open("r+b") as file:
            size = sum(len(line) for line in file if line.endswith(b"\n"))
            file.truncate(size)


def read_journals(folder: Path) -> Iterator[tuple[Completion, Path, int]]:
    """Yield (completion, file, place of its line in bytes) of all whole lines. Raises DataError for damage.

    A completion that was judged again has several lines; the last one counts.
    """
    for path in journals(folder):
        place = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                yield completion_in(line, path, number), path, place
                place += len(line)


def completion_in(line: bytes, path: Path, number: int) -> Completion:
    """Return the completion in a line. Raises DataError if it is not as it was written."""
    try:
        digest, content = line.decode("utf-8", "surrogatepass").rstrip("\n").split(" ", 1)
        if digest == _hash(content):
            return Completion(**json.loads(content))
    except (ValueError, TypeError):
        pass
    raise DataError(
        f"{path}:{number} is damaged",
        "it is a completion that an earlier start has written, and its hash differs",
        f"remove {path}: its completions are sampled again",
        code="cached-file-damaged",
    )


class Lines:
    """Reads completions by their place. Use it in a `with` block."""

    def __init__(self) -> None:
        self._files: dict[Path, BinaryIO] = {}

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: Any) -> None:
        for file in self._files.values():
            file.close()

    def read(self, path: Path, place: int) -> Completion:
        """Return the completion whose line begins there."""
        if path not in self._files:
            self._files[path] = path.open("rb")
        file = self._files[path]
        file.seek(place)
        return completion_in(file.readline(), path, 0)


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> tuple[int, str]:
    """Write JSON lines through to the disk. Return (their number, SHA-256 of the file)."""
    import os

    digest, count = hashlib.sha256(), 0
    with path.open("wb") as file:
        for record in records:
            line = (json.dumps(record, ensure_ascii=False, default=str) + "\n").encode("utf-8", "replace")
            digest.update(line)
            file.write(line)
            count += 1
        file.flush()
        os.fsync(file.fileno())
    return count, digest.hexdigest()


def _hash(content: str) -> str:
    data = content.encode("utf-8", "surrogatepass")
    return hashlib.sha256(data).hexdigest()[:HASH_CHARACTERS]
