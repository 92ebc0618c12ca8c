"""The manifest of a checkpoint: size and SHA-256 of every file in it, and of the manifest itself.

`manifest.json` is written last. A folder that has it holds what was saved, or its files differ from it and are named.
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
    """What a file must be."""

    size: int  # bytes
    sha256: str


class ManifestError(Exception):
    """Why a folder is not what its manifest says; the text names the file."""


def seal(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Entries of the small files `names`, which are then on the disk."""
    entries = {}
    for name in names:
        sync(folder / name)
        entries[name] = _entry(folder / name)
    return entries


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def manifest_text(entries: Mapping[str, FileEntry]) -> str:
    """The one spelling of a manifest, so that any changed bit in it shows."""
    files = {name: asdict(entries[name]) for name in sorted(entries)}
    body = json.dumps(files, indent=1)
    return json.dumps({"files": files, "sha256": hashlib.sha256(body.encode()).hexdigest()}, indent=1) + "\n"


def read_manifest(folder: Path) -> dict[str, FileEntry] | None:
    """File -> what it must be; None for a folder without manifest. Raises ManifestError for a damaged one."""
    path = folder / MANIFEST_FILE
    try:
        text = path.read_bytes().decode("utf-8")
        entries = {name: FileEntry(**entry) for name, entry in json.loads(text)["files"].items()}
        is_whole = text == manifest_text(entries)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ManifestError(f"{path} cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):  # whatever a torn or changed file makes of it
        is_whole = False
    if not is_whole:
        raise ManifestError(f"{path} is damaged")
    return entries


def check_sizes(folder: Path, entries: Mapping[str, FileEntry]) -> str | None:
    """What is wrong with the names and sizes of the files, None if nothing; reads no contents."""
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
    """What is wrong with the files, None if nothing. Reads all of them."""
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
    """The files that `rank` checks when all ranks check together: every file once, about as many bytes each."""
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
