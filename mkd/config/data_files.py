"""The paths of the data flags: blends, the suffixes of files of records, and errors about other paths."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mkd.config.not_paths import why_no_path
from mkd.config.run_files import DataConfig
from mkd.errors import DataError, MkdError, UsageError, collect_error

JSON_SUFFIXES = (".jsonl", ".json")
TABLE_SUFFIXES = (".parquet", ".arrow")
TEXT_SUFFIX = ".txt"
LINE_SUFFIXES = (*JSON_SUFFIXES, TEXT_SUFFIX)
RAW_SUFFIXES = (*JSON_SUFFIXES, *TABLE_SUFFIXES, TEXT_SUFFIX)
COMPRESSED = (".gz", ".zst")  # after a suffix of lines
CORPUS_SUFFIXES = (".bin", ".idx")  # after the prefix of a tokenised corpus
KNOWN_FILES = f"{', '.join(RAW_SUFFIXES)}, lines also with {' or '.join(COMPRESSED)}"
HUB = "hub:"
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


def records_suffix(path: str | Path) -> str:
    """Return the suffix that says how records are read, without that of compression; "" if unknown."""
    name = Path(path).name
    plain = next((name.removesuffix(end) for end in COMPRESSED if name.endswith(end)), None)
    suffix = Path(name if plain is None else plain).suffix
    return suffix if suffix in (RAW_SUFFIXES if plain is None else LINE_SUFFIXES) else ""


def is_pattern(path: str) -> bool:
    """Return True if a path may match several names."""
    return any(character in path for character in "*?[")


def is_raw(path: str) -> bool:
    """Return True if a path names records to tokenise, else it is the prefix of a tokenised corpus.

    Records are in a file, a folder, files that match a pattern, or a data set of the hub.
    """
    if path.startswith(HUB) or records_suffix(path):
        return True
    if any(os.path.isfile(path + end) for end in CORPUS_SUFFIXES):
        return False
    return is_pattern(path) or os.path.isdir(path)


def all_tokenised(data: DataConfig) -> bool:
    """Return True if the data flags name corpora, and all are tokenised."""
    paths = data_paths([], data)  # flags that cannot be parsed are reported where the data are checked
    return bool(paths) and not any(map(is_raw, paths))


def require_file(path: str, flag: str) -> None:
    """Raise DataError if `path` is not one file."""
    if not os.path.isfile(path):
        raise not_found(path, flag)


def not_found(path: str, flag: str, looked_for: str = "a file of this name") -> DataError:
    """Return the error for a path where nothing is."""
    do = "check the path, or make a tokenised pair with `mkd preprocess`"
    if "/" in path and HUB_ID.fullmatch(path) and not records_suffix(path):
        do = f"check the path; the data set {path} of the Hugging Face hub would be {flag} {HUB}{path}"
    why = f"looked for {looked_for}"
    if _number(path) is not None:
        why, do = "it is a number", f"weights stand before their paths: {flag} WEIGHT PATH WEIGHT PATH ..."
    elif "," in path and all(map(os.path.exists, path.split(","))):
        why, do = "it has commas", f"write blanks between paths: {flag} {path.replace(',', ' ')}"
    why, do = why_no_path(path) or (why, do)
    return DataError(f"{flag} {path}: nothing found", why, do, code="data-path-not-found")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
