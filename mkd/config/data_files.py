"""The paths of the data flags: blends, the suffixes of files of records, and errors about other paths."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from glob import glob
from itertools import product
from pathlib import Path

from mkd.config.run_files import DataConfig
from mkd.errors import DataError, MkdError, UsageError, collect_error

JSON_SUFFIXES = (".jsonl", ".json")
ARROW_SUFFIXES = (".parquet", ".arrow")
TEXT_SUFFIX = ".txt"
RAW_SUFFIXES = (*JSON_SUFFIXES, *ARROW_SUFFIXES, TEXT_SUFFIX)
LIKELY, UNLIKELY = (".parquet", ".arrow", ".jsonl", ".bin"), (".json", TEXT_SUFFIX)  # data in a folder
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class Blend:
    """Paths of corpora, and their weights if given."""

    paths: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_blend(values: Sequence[str], flag: str = "--data-path") -> Blend:
    """Parse `W1 P1 W2 P2 ...` (weights of any scale), or paths alone. Raises UsageError for anything else."""
    values = [str(value) for value in values]
    if not values:
        raise UsageError(
            f"{flag} is empty",
            do=f"give {flag} PATH, or {flag} WEIGHT PATH WEIGHT PATH ...",
            code="value-not-valid",
        )
    if _number(values[0]) is not None and len(values) % 2 and len(values) > 1:
        raise UsageError(
            f"{flag} has {len(values)} values: a weight or a path is missing",
            f"the list starts with the number {values[0]}, "
            f"so it is read as {flag} WEIGHT PATH WEIGHT PATH ...",
            "give every path a weight, or none; a path that is a number is written ./1",
            code="value-not-valid",
        )
    if len(values) == 1 or _number(values[0]) is None:
        return Blend(tuple(values), None)
    weights: list[float] = []
    for value in values[::2]:
        weight = _number(value)
        if weight is None or not 0 < weight < math.inf:
            raise UsageError(
                f"{flag}: {value} stands where a positive weight is expected",
                f"the list starts with a number, so it is read as {flag} WEIGHT PATH WEIGHT PATH ...",
                "give every path a weight, or none",
                code="value-not-valid",
            )
        weights.append(weight)
    return Blend(tuple(values[1::2]), tuple(weights))


def data_paths(problems: list[MkdError], data: DataConfig) -> dict[str, str]:
    """Map the path of each corpus to its flag. Append an error for a flag that cannot be parsed."""
    found: dict[str, str] = {}
    for flag, values in (("--data-path", data.data_path), ("--valid-data-path", data.valid_data_path)):
        blend = collect_error(problems, partial(parse_blend, values, flag)) if values else None
        found |= {path: flag for path in (blend.paths if blend else ()) if path not in found}
    return found


def is_raw(path: str) -> bool:
    """Return True if a path is a file of records to tokenise, else it is the prefix of a tokenised corpus."""
    return Path(path).suffix in RAW_SUFFIXES


def all_tokenised(data: DataConfig) -> bool:
    """Return True if the data flags name corpora, and all are tokenised."""
    paths = data_paths([], data)  # flags that cannot be parsed are reported where the data are checked
    return bool(paths) and not any(map(is_raw, paths))


def require_file(path: str, flag: str) -> None:
    """Raise DataError if `path` is not a file."""
    if not Path(path).is_file():
        raise no_such_file(path, flag)


def no_such_file(path: str, flag: str, looked_for: str = "a file of this name") -> DataError:
    """Return the error for a path that is not a file: a folder, a pattern, a hub data set or a typo."""
    if Path(path).is_dir():
        return DataError(
            f"{flag} {path} is a folder",
            "files are named one by one: they are read in this order, and each may have a weight",
            _names_in(Path(path)),
            code="data-path-not-a-file",
        )
    if any(character in path for character in "*?["):
        found = sorted(glob(path, recursive=True))
        return DataError(
            f"{flag} {path} is a pattern, not a file",
            f"the shell expands it if it is not quoted; {len(found)} files match it here",
            f"write it without quotes: {flag} {path}" if found else "check the path",
            code="data-path-not-a-file",
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


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
