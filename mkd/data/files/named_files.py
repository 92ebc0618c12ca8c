"""The files that a path of a data flag names: one file, a folder, a pattern, or a data set of the hub.

Files of a folder or a pattern are read in the order of their names, by code point. They are one corpus.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from mkd.config.data_files import (
    COMPRESSED,
    CORPUS_SUFFIXES,
    HUB,
    KNOWN_FILES,
    RAW_SUFFIXES,
    is_pattern,
    not_found,
    records_suffix,
)
from mkd.data.files.hub_layout import DESCRIPTIONS
from mkd.data.files.hub_sets import HubFiles, hub_files
from mkd.data.files.opened import text_bytes
from mkd.errors import DataError
from mkd.human import counted

NOT_READ = (
    *(".csv", ".tsv", ".avro", ".orc", ".msgpack", ".ndjson", ".jsonlines"),
    *(".bz2", ".xz", ".lz4", ".br", ".zip", ".tar", ".tgz", ".7z", ".rar"),
    *(".part", ".partial", ".incomplete", ".tmp", ".crdownload"),  # downloads that have not ended
    *(*COMPRESSED, *RAW_SUFFIXES),  # .csv.gz, .JSONL
)
"""Ends of names that may be data, which mkd does not read: beside others they are not skipped silently."""
MOST_NAMED = 5  # names in an error


@dataclass(frozen=True)
class NamedFiles:
    """Files of records in the order in which they are read."""

    path: str  # as the user gave it
    names: tuple[str, ...]  # local paths, or names in a data set of the hub
    hub: HubFiles | None = None

    @property
    def text_bytes(self) -> int:
        """Size of their text; where it is compressed, estimated. Of the hub: size of what it stores."""
        return self.hub.num_bytes if self.hub else text_bytes(self.names)

    def growth(self, read: Sequence[str]) -> float:
        """Return how many times the text of `read`, some of the files on this machine, all of them have."""
        if self.hub:  # it tells what it stores, which may be compressed
            return self.hub.num_bytes / max(1, sum(os.path.getsize(one) for one in read))
        return self.text_bytes / max(1, text_bytes(read))

    @property
    def cache_name(self) -> str:
        """Beginning of the name of its tokens in a cache folder."""
        if self.names == (self.path,):
            return Path(self.path).stem
        name = self.path.removeprefix(HUB) if self.hub else Path(os.path.normpath(self.path)).name
        return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "files"

    def local(self, progress: Callable[[], None] = lambda: None) -> tuple[str, ...]:
        """Return the paths on this machine. Files of the hub are downloaded first.

        `progress` is called for each of them, and may raise.
        """
        return self.hub.download(progress) if self.hub else self.names

    def at_hand(self) -> tuple[str, ...]:
        """Return the paths that are on this machine, at least the first, which may be downloaded."""
        return self.hub.at_hand() if self.hub else self.names

    def describe(self) -> str:
        """Return a phrase for the start; "" if the user named one file."""
        if self.names == (self.path,):
            return ""
        what = self.hub.describe() if self.hub else counted(len(self.names), "file")
        ends = self.names[0] if len(self.names) == 1 else f"{self.names[0]} to {self.names[-1]}"
        return f"{self.path} is {what}: {ends}"


def named_files(path: str, flag: str) -> NamedFiles:
    """Return the files that `path` names. For a data set of the hub, its list of files is asked for.

    Raises DataError if there are none, or if it is not clear which of them are meant.
    """
    path = str(path)
    if path.startswith(HUB):
        found = hub_files(path, flag)
        _of_one_kind(found.names, f"{flag} {path}", f"{HUB}{found.name}:*")
        return NamedFiles(path, found.names, found)
    if os.path.isfile(path):
        return NamedFiles(path, (path,))
    if os.path.isdir(path):
        return NamedFiles(path, _in_folder(Path(path), flag))
    if is_pattern(path):
        return NamedFiles(path, _matching(path, flag))
    raise not_found(path, flag)


def files_if_any(path: str) -> NamedFiles | None:
    """Return the files that `path` names; None if that is an error, which the checks of a run report."""
    with suppress(DataError):
        return named_files(path, "")
    return None


def require_files(path: str, flag: str) -> None:
    """Raise DataError unless `path` names files of records. Of the hub nothing is downloaded."""
    named_files(path, flag)


def all_local(paths: Iterable[str], flag: str) -> list[str]:
    """Return all files that `paths` name, on this machine."""
    return [name for path in paths for name in named_files(path, flag).local()]


def _in_folder(folder: Path, flag: str) -> tuple[str, ...]:
    present = sorted(one.name for one in folder.iterdir() if one.is_file())
    names = [name for name in present if name[0] not in "._" and name not in DESCRIPTIONS]
    if any(map(records_suffix, names)):
        return _of_one_kind([str(folder / name) for name in names], f"{flag} {folder}", f"{folder}/*")
    corpora = [name for name in present if name.endswith(".idx")]
    inside = list(_folders_with_records(folder))
    do = f"name files that end in {KNOWN_FILES}"
    if corpora:
        do = f"name its tokenised corpora by their prefixes, such as {(folder / corpora[0]).with_suffix('')}"
    elif inside:
        pattern = f"{folder}/**/*{_kind(inside[0])}"
        do = f"name one of the folders in it, such as {inside[0]}, or a pattern: {pattern}"
    what, why = f"{flag} {folder} has no files of records", "folders in a folder are not read"
    raise DataError(what, why, do, code="data-path-not-found")


def _folders_with_records(folder: Path) -> Iterator[Path]:
    """Yield the folders in `folder` that have files of records, `train` first."""
    inside = sorted(one for one in folder.iterdir() if one.is_dir() and one.name[0] not in "._")
    for one in sorted(inside, key=lambda one: one.name != "train"):
        if any(records_suffix(name) for name in os.listdir(one)):
            yield one


def _kind(folder: Path) -> str:
    """Return the suffix of the first file of records in a folder."""
    return next(filter(None, map(records_suffix, sorted(os.listdir(folder)))))


def _matching(pattern: str, flag: str) -> tuple[str, ...]:
    found = sorted(one for one in glob(pattern, recursive=True) if os.path.isfile(one))
    if not found:
        what, why = f"{flag} {pattern}: no file matches", f"the present folder is {os.getcwd()}"
        raise DataError(what, why, "check the pattern; ** matches folders too", code="data-path-not-found")
    if not any(map(records_suffix, found)):
        corpora = any(one.endswith(CORPUS_SUFFIXES) for one in found)
        what = f"{flag} {pattern} matches {_some(found)}, and no file of records"
        do = f"match files that end in {KNOWN_FILES}"
        if corpora:
            do = "name tokenised corpora one by one, by their prefixes: each may have a weight"
        raise DataError(what, "the suffix says how a file is read", do, code="data-file-kind-unknown")
    return _of_one_kind(found, f"{flag} {pattern}", pattern)


def _of_one_kind(paths: Sequence[str], what: str, pattern: str) -> tuple[str, ...]:
    """Return the files of records among `paths`. Raises DataError unless they are of one kind."""
    kinds = defaultdict[str, list[str]](list)
    for path in paths:
        other = Path(path).suffix if path.lower().endswith(NOT_READ) else ""
        if kind := records_suffix(path) or other:
            kinds[kind].append(path)
    if not any(map(records_suffix, paths)):
        why, do = "the suffix says how a file is read", f"name files that end in {KNOWN_FILES}"
        raise DataError(f"{what} has no file of records", why, do, code="data-file-kind-unknown")
    if len(kinds) > 1:
        shown = ", ".join(f"{counted(len(names), 'file')} {kind}" for kind, names in sorted(kinds.items()))
        known = (kind for kind, names in kinds.items() if records_suffix(names[0]))
        most = max(known, key=lambda kind: len(kinds[kind]))
        do = f"name one kind, such as {_stem(pattern)}*{most}*, or give each its own path"
        raise DataError(
            f"{what} has files of several kinds: {shown}",
            "one may describe the others, be the same records again, or hold others that are not read",
            do,
            code="data-files-unclear",
        )
    (names,) = kinds.values()
    _refuse_copies(names, what)
    return tuple(names)


def _stem(pattern: str) -> str:
    """Return the folder of a pattern, with its slash."""
    return pattern.rstrip("*") if pattern.startswith(HUB) else pattern[: pattern.rfind("/") + 1]


def _refuse_copies(names: Sequence[str], what: str) -> None:
    """Raise DataError if a file is there both plain and compressed."""
    plain = defaultdict[str, list[str]](list)
    for name in names:
        plain[next((name.removesuffix(end) for end in COMPRESSED if name.endswith(end)), name)].append(name)
    copies = next((both for both in plain.values() if len(both) > 1), None)
    if copies:
        raise DataError(
            f"{what} has {' and '.join(copies)}",
            "they seem to hold the same records, which would be read twice",
            "remove one of them, or name the files by a pattern",
            code="data-files-unclear",
        )


def _some(paths: Sequence[str]) -> str:
    shown = ", ".join(paths[:MOST_NAMED])
    return shown + (f" and {len(paths) - MOST_NAMED} more" if len(paths) > MOST_NAMED else "")
