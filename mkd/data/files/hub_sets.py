"""Data sets of the Hugging Face hub: hub:ORG/NAME[@REVISION][:CONFIG][:SPLIT], or :PATTERN of its files.

Files stay in the hub's cache as the hub has them. Without a network, what is in the cache is read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mkd.config.data_files import HUB, KNOWN_FILES, records_suffix
from mkd.data.files.hub_layout import HELD_OUT, TRAIN, Layout, Splits, converted_layout, matching, read_layout
from mkd.errors import DataError, first_line
from mkd.human import counted

NAME = re.compile(r"(?P<name>[\w-][\w.-]*(/[\w.-]+)?)(@(?P<revision>[^:@]+))?(?P<parts>(:[^:]+){0,2})")
FORM = f"{HUB}ORG/NAME, {HUB}ORG/NAME:SPLIT or {HUB}ORG/NAME:CONFIG:SPLIT"
MAIN, CONVERTED = "main", "refs/convert/parquet"
README = "README.md"
LISTS = "mkd_file_lists"  # folder in the hub's cache of a data set: names of all files of a commit
TIMEOUT_S = 20.0
SHARD = re.compile(r"(.*-)(\d+)(-of-)(\d+)(.*)")


@dataclass(frozen=True)
class Listing:
    """The files of a data set at one commit."""

    commit: str
    revision: str  # that was asked for
    sizes: Mapping[str, int | None]  # name -> bytes; None: it is missing in the cache, see `is_cached`
    is_cached: bool  # the hub was not reached: they are those of the cache


@dataclass(frozen=True)
class HubFiles:
    """Files of one split of a data set."""

    name: str
    listing: Listing
    names: tuple[str, ...]
    part: str  # configuration and split, or the pattern, for people

    @property
    def num_bytes(self) -> int:
        """Size of the files as the hub has them; of those in the cache alone, if it was not reached."""
        sizes = (self.listing.sizes.get(name) for name in self.names)
        return sum(size or 0 for size in sizes)

    def download(self, progress: Callable[[], None] = lambda: None) -> tuple[str, ...]:
        """Return the paths of all files in the hub's cache, after those not there are downloaded."""
        paths = []
        for name in self.names:
            progress()
            paths.append(_file(self.name, self.listing, name))
        return tuple(paths)

    def at_hand(self) -> tuple[str, ...]:
        """Return the paths of the files in the hub's cache; the first is downloaded if it is not there."""
        from huggingface_hub import try_to_load_from_cache

        found = [_file(self.name, self.listing, self.names[0])]
        for name in self.names[1:]:
            path = try_to_load_from_cache(self.name, name, repo_type="dataset", revision=self.listing.commit)
            found += [path] if isinstance(path, str) else []
        return tuple(found)

    def describe(self) -> str:
        """Return a phrase with what was found, and at which commit."""
        where = ", from the cache: the hub was not reached" if self.listing.is_cached else ""
        files = f"{counted(len(self.names), 'file')} of {self.part}"
        return f"{files} at commit {self.listing.commit[:12]}{where}"


def hub_files(path: str, flag: str) -> HubFiles:
    """Return the files of `hub:NAME...`. The hub, or its cache, is asked for their names alone.

    Raises DataError for another form, a data set that cannot be had, and a configuration or split that it
    does not have.
    """
    match = NAME.fullmatch(path.removeprefix(HUB))
    if match is None:
        what, do = f"{flag} {path} does not name a data set of the hub", f"write {FORM}"
        raise DataError(what, "", do, code="data-set-part-unknown")
    name, revision = match["name"], match["revision"] or MAIN
    parts = match["parts"].split(":")[1:]
    where = f"{flag} {path}"
    listing = _list(name, revision, where)
    if len(parts) == 1 and ("/" in parts[0] or "*" in parts[0] or records_suffix(parts[0])):
        names = matching(listing.sizes, parts[0])
        if not names:
            raise _unknown(where, f"no file of {name} matches {parts[0]}", "files", sorted(listing.sizes))
        return _complete(HubFiles(name, listing, names, parts[0]), where)
    layout = read_layout([*listing.sizes], _readme(name, listing))
    if revision == MAIN and not _is_readable(layout):
        with suppress(DataError):
            copies = _list(name, CONVERTED, where)
            listing, layout = copies, converted_layout(copies.sizes)
    if not any(splits for splits in layout.configs.values()):
        raise _nothing_to_read(where, listing)
    config, split, names = _choose(layout, parts, where)
    if not all(map(records_suffix, names)):
        raise _nothing_to_read(where, listing)
    return _complete(HubFiles(name, listing, names, f"{config}, {split}"), where)


def _choose(layout: Layout, parts: list[str], where: str) -> tuple[str, str, tuple[str, ...]]:
    """Return (configuration, split, files) that `parts` ask for."""
    configs = [*layout.configs]
    if len(parts) == 2 or (len(parts) == 1 and parts[0] in configs):
        config, rest = parts[0], parts[1:]
    elif layout.default is None:
        known = f"no configuration is chosen, and {len(configs)} are there"
        if parts:
            known = f"{parts[0]} is no configuration, and a split needs one"
        raise _unknown(where, known, "configurations", configs)
    else:
        config, rest = layout.default, parts
    if config not in configs:
        raise _unknown(where, f"there is no configuration {config}", "configurations", configs)
    splits: Splits = {split: names for split, names in layout.configs[config].items() if names}
    known_splits = [*splits]
    if not rest:
        is_held_out = known_splits[0].partition("_")[0] in HELD_OUT if known_splits else False
        if TRAIN not in splits and (len(known_splits) != 1 or is_held_out):
            raise _unknown(where, f"{config} has no split {TRAIN}", f"splits of {config}", known_splits)
        rest = [TRAIN if TRAIN in splits else known_splits[0]]
    if rest[0] not in splits:
        of_config = f"splits of {config}"
        others = f"; configurations: {', '.join(configs)}" if len(configs) > 1 and len(parts) == 1 else ""
        raise _unknown(where, f"{config} has no split {rest[0]}", of_config, known_splits, others)
    return config, rest[0], splits[rest[0]]


def _unknown(where: str, what: str, kind: str, known: list[str], more: str = "") -> DataError:
    shown = ", ".join(known[:20]) + (f" and {len(known) - 20} more" if len(known) > 20 else "")
    return DataError(
        f"{where}: {what}", f"{kind}: {shown or 'none'}{more}", f"write {FORM}", code="data-set-part-unknown"
    )


def _is_readable(layout: Layout) -> bool:
    names = [name for splits in layout.configs.values() for of_split in splits.values() for name in of_split]
    return bool(names) and all(map(records_suffix, names))


def _nothing_to_read(where: str, listing: Listing) -> DataError:
    others = sorted({Path(name).suffix for name in listing.sizes} - {"", ".md"})
    return DataError(
        f"{where} has no files that mkd reads",
        f"it has files that end in {', '.join(others) or 'nothing'}, and the hub has no Parquet copy of them",
        f"convert them to {KNOWN_FILES}, or name some of its files: {HUB}ORG/NAME:FOLDER/*.jsonl",
        code="data-file-kind-unknown",
    )


def _complete(files: HubFiles, where: str) -> HubFiles:
    """Return `files`. Raises DataError if the hub was not reached and some are not in its cache.

    mkd keeps the list of a commit there (`_remember`); of files that others downloaded, their numbers tell.
    """
    if not files.listing.is_cached:
        return files
    wanted = dict.fromkeys(one for name in files.names for one in _shards(name))
    missing = [one for one in wanted if files.listing.sizes.get(one) is None]
    if missing:
        raise DataError(
            f"{where}: {counted(len(missing), 'file')} of {len(wanted)} are not in the hub's cache",
            f"the hub was not reached, and {missing[0]} is missing",
            f"download it with a network: hf download {files.name} --repo-type dataset",
            code="data-set-not-found",
        )
    return files


def _shards(name: str) -> Iterator[str]:
    """Yield the names of all parts of NAME-00000-of-00003.jsonl, else the name alone."""
    match = SHARD.fullmatch(name)
    if match is None:
        yield name
        return
    head, number, of, total, tail = match.groups()
    yield from (f"{head}{index:0{len(number)}}{of}{total}{tail}" for index in range(int(total)))


def _list(name: str, revision: str, where: str) -> Listing:
    from huggingface_hub import constants

    try:
        return list_files(name, revision, os.fspath(constants.HF_HUB_CACHE))
    except DataError as error:
        raise error.located(where) from error


@cache  # every check and the run itself read the same commit
def list_files(name: str, revision: str, cache_folder: str) -> Listing:
    """Return the files of a data set at a revision: from the hub, else those in its cache."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        api = HfApi()
        info = api.dataset_info(name, revision=revision, timeout=TIMEOUT_S)
        tree = api.list_repo_tree(name, recursive=True, revision=info.sha, repo_type="dataset")
        sizes = {one.path: one.size for one in tree if hasattr(one, "size")}
        return Listing(str(info.sha), revision, sizes, is_cached=False)
    except (RepositoryNotFoundError, RevisionNotFoundError, GatedRepoError) as error:
        raise _not_had(name, revision, error) from error
    except Exception as error:  # each network library has its own classes of errors
        found = _cached_listing(Path(cache_folder), name, revision)
        if found is None:
            raise _not_had(name, revision, error) from error
        return found


def _cached_listing(cache_folder: Path, name: str, revision: str) -> Listing | None:
    """Return the files in the hub's cache; None if it has not this data set at this revision."""
    folder = _folder(cache_folder, name)
    ref = folder / "refs" / revision
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
    snapshot = folder / "snapshots" / commit
    if not snapshot.is_dir():
        return None
    files = [path for path in sorted(snapshot.rglob("*")) if path.is_file()]
    sizes: dict[str, int | None] = {
        path.relative_to(snapshot).as_posix(): path.stat().st_size for path in files
    }
    return Listing(commit, revision, dict.fromkeys(_all_names(folder, commit)) | sizes, is_cached=True)


def _folder(cache_folder: Path, name: str) -> Path:
    """Return the folder of a data set in the hub's cache."""
    return cache_folder / f"datasets--{name.replace('/', '--')}"


def _all_names(folder: Path, commit: str) -> list[str]:
    """Return all files of a commit, if mkd has seen the hub's list."""
    with suppress(OSError, ValueError):
        names = json.loads((folder / LISTS / f"{commit}.json").read_text(encoding="utf-8"))
        return [name for name in names if isinstance(name, str)]
    return []


def _remember(name: str, listing: Listing) -> None:
    """Note in the hub's cache which commit the revision is, and all its files, for runs without a network."""
    from huggingface_hub import constants

    folder = _folder(Path(constants.HF_HUB_CACHE), name)
    notes = {folder / LISTS / f"{listing.commit}.json": json.dumps(sorted(listing.sizes), indent=0)}
    if listing.revision != listing.commit:
        notes[folder / "refs" / listing.revision] = listing.commit
    for path, content in notes.items():
        with suppress(OSError):  # a cache that is read-only has the files already
            if not path.exists() or path.read_text(encoding="utf-8") != content:
                path.parent.mkdir(parents=True, exist_ok=True)
                draft = path.with_name(f"{path.name}.{os.getpid()}")
                draft.write_text(content, encoding="utf-8")
                draft.replace(path)


def _readme(name: str, listing: Listing) -> str:
    if README not in listing.sizes:
        return ""
    return Path(_file(name, listing, README)).read_text(encoding="utf-8", errors="replace")


def _file(name: str, listing: Listing, file: str) -> str:
    """Return the path of a file in the hub's cache, after it is downloaded if it is not there."""
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(
            name, file, repo_type="dataset", revision=listing.commit, local_files_only=listing.is_cached
        )
    except Exception as error:  # each network library has its own classes of errors
        raise DataError(
            f"{file} of the data set {name} cannot be downloaded",
            _reason(error),
            "check the network, the login (hf auth login) and the disk of the hub's cache (HF_HOME)",
            code="data-set-not-found",
        ) from error
    if not listing.is_cached:
        _remember(name, listing)
    return path


def _not_had(name: str, revision: str, error: Exception) -> DataError:
    at = "" if revision == MAIN else f" at revision {revision}"
    do = "check the name; without a network, download it before: "
    return DataError(
        f"there is no data set {name}{at}",
        _reason(error),
        f"{do}hf download {name} --repo-type dataset",
        code="data-set-not-found",
    )


def _reason(error: Exception) -> str:
    """Return what the hub's answer means."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return "the hub gives it only to people who have accepted its terms there and log in (hf auth login)"
    if isinstance(error, RepositoryNotFoundError):
        return "the Hugging Face hub has none, or it is private and you are not logged in (hf auth login)"
    if isinstance(error, RevisionNotFoundError):
        return "the data set has no such branch, tag or commit"
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and it is not in the hub's cache"
    if isinstance(error, LocalEntryNotFoundError):
        return "the Hugging Face hub cannot be reached, and the file is not in its cache"
    return f"the Hugging Face hub cannot be reached, and it is not in its cache: {first_line(error)}"
