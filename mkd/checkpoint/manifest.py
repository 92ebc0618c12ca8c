"""The manifest of a checkpoint: size and SHA-256 of every file in it, and of the manifest itself.

`manifest.json` is written last. A folder with a manifest holds exactly what was saved; otherwise the check
names the files that differ.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

MANIFEST_FILE = "manifest.json"
READ_BYTES = 1 << 22
THREADS = 4  # per rank; hashing releases the interpreter lock


@dataclass(frozen=True)
class FileEntry:
    """Expected size and hash of a file."""

    size: int  # bytes
    sha256: str


class ManifestError(Exception):
    """A folder differs from its manifest; the text names the file."""


def seal(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Sync the small files `names` to the disk and return their entries."""
    entries = {}
    for name in names:
        sync(folder / name)
        entries[name] = _entry(folder / name)
    return entries


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def manifest_text(entries: Mapping[str, FileEntry]) -> str:
    """Return the only valid text of a manifest, so that any changed bit in it is detected."""
    files = {name: asdict(entries[name]) for name in sorted(entries)}
    body = json.dumps(files, indent=1)
    return json.dumps({"files": files, "sha256": hashlib.sha256(body.encode()).hexdigest()}, indent=1) + "\n"


def read_manifest(folder: Path) -> dict[str, FileEntry] | None:
    """Return file -> entry; None for a folder without a manifest. Raises ManifestError if it is damaged."""
    path = folder / MANIFEST_FILE
    try:
        text = path.read_bytes().decode("utf-8")
        entries = {name: FileEntry(**entry) for name, entry in json.loads(text)["files"].items()}
        is_whole = text == manifest_text(entries)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ManifestError(f"{path} cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):  # a torn or changed file
        is_whole = False
    if not is_whole:
        raise ManifestError(f"{path} is damaged")
    return entries


def check_sizes(folder: Path, entries: Mapping[str, FileEntry]) -> str | None:
    """Return the first problem with names and sizes of the files, or None. Reads no contents."""
    for name, entry in entries.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            return f"{folder / name} is missing"
        except OSError as error:
            return f"{folder / name} cannot be read: {error}"
        if size != entry.size:
            return f"{folder / name} has {size} bytes, the manifest says {entry.size}"
    return None


def check_contents(folder: Path, entries: Mapping[str, FileEntry]) -> str | None:
    """Return the first problem with the files, or None. Reads all of them."""
    problem = check_sizes(folder, entries)
    if problem is not None:
        return problem
    with ThreadPoolExecutor(THREADS) as pool:
        problems = pool.map(lambda name: _difference(folder / name, entries[name]), entries)
        for name, problem in zip(entries, problems, strict=True):
            if problem is not None:
                return f"{folder / name} {problem}"
    return None


def share_of(entries: Mapping[str, FileEntry], rank: int, world_size: int) -> dict[str, FileEntry]:
    """Return the files that `rank` checks: every file on one rank, about equal bytes per rank."""
    loads, mine = [0] * world_size, {}
    for name in sorted(entries, key=lambda name: (-entries[name].size, name)):
        lightest = loads.index(min(loads))
        loads[lightest] += entries[name].size + 1
        if lightest == rank:
            mine[name] = entries[name]
    return mine


def _difference(path: Path, expected: FileEntry) -> str | None:
    try:
        found = _entry(path)
    except OSError as error:
        return f"cannot be read: {error}"
    return None if found == expected else "has other contents than the manifest says (SHA-256)"


def _entry(path: Path) -> FileEntry:
    digest, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
            size += len(block)
    return FileEntry(size, digest.hexdigest())
