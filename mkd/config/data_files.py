"""The suffixes of files of records, and what to say about a path that is no such file."""

from __future__ import annotations

import re
from glob import glob
from itertools import product
from pathlib import Path

from mkd.errors import DataError

JSON_SUFFIXES = (".jsonl", ".json")
ARROW_SUFFIXES = (".parquet", ".arrow")
TEXT_SUFFIX = ".txt"
RAW_SUFFIXES = (*JSON_SUFFIXES, *ARROW_SUFFIXES, TEXT_SUFFIX)
LIKELY, UNLIKELY = (".parquet", ".arrow", ".jsonl", ".bin"), (".json", TEXT_SUFFIX)  # data in a folder
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def is_raw(path: str) -> bool:
    """Return True if a path is a file of records to tokenise, else it is the prefix of a tokenised corpus."""
    return Path(path).suffix in RAW_SUFFIXES


def require_file(path: str, flag: str) -> None:
    """Raise DataError if `path` is not a file."""
    if not Path(path).is_file():
        raise no_such_file(path, flag)


def no_such_file(path: str, flag: str, looked_for: str = "a file of this name") -> DataError:
    """Return the error for a path that is no file: a folder, a pattern, a data set of the hub or a typo."""
    if Path(path).is_dir():
        return DataError(
            f"{flag} {path} is a folder",
            "files are named one by one: they are read in this order, and each may have a weight",
            _names_in(Path(path)),
            code="data-path-is-folder",
        )
    if any(character in path for character in "*?["):
        found = sorted(glob(path, recursive=True))
        return DataError(
            f"{flag} {path} is a pattern, not a file",
            f"the shell expands it if it is not quoted; {len(found)} files match it here",
            f"write it without quotes: {flag} {path}" if found else "check the path",
            code="data-path-is-pattern",
        )
    do = "check the path, or make a tokenised pair with `mkd preprocess`"
    if "/" in path and HUB_ID.fullmatch(path) and Path(path).suffix not in RAW_SUFFIXES:
        do = (
            f"check the path; a data set of the Hugging Face hub is downloaded first: `hf download {path} "
            "--repo-type dataset --local-dir FOLDER`, and then named by its files, such as FOLDER/*.parquet"
        )
    return DataError(
        f"{flag} {path}: nothing found", f"looked for {looked_for}", do, code="data-path-not-found"
    )


def _names_in(folder: Path) -> str:
    """Return which names to give instead of a folder: those of files in it, or in a folder of it."""
    inside = sorted(one for one in folder.iterdir() if one.is_dir())
    inside.sort(key=lambda one: one.name != "train")
    for place, suffix in (*product((folder, *inside), LIKELY), *product((folder,), UNLIKELY)):
        files = sorted(place.glob(f"*{suffix}"))
        if files and suffix == ".bin":
            return f"name its tokenised corpora by their prefixes, such as {files[0].with_suffix('')}"
        if files:
            return f"name its files: {place}/*{suffix}"
    return f"name files that end in {', '.join(RAW_SUFFIXES)}; the folder has none"
