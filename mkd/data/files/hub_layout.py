"""Configurations and splits of a data set of the hub, from its README.md and the names of its files.

The rules are those of the datasets library (its documentation: "Structure your repository"): `configs` in the
README's header, else the names of folders and files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from mkd.config.data_files import records_suffix

WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split -> words in names of folders and files."""
TRAIN, DEFAULT = "train", "default"
HELD_OUT = (*WORDS["validation"], *WORDS["test"])
"""First words of splits that nobody trains on without naming them."""
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "metadata.json")
"""Files that Hugging Face datasets writes beside its data."""
_HEADER = re.compile(r"---\s*\n(.*?)\n---\s*(\n|$)", re.DOTALL)
_SHARD = re.compile(r"(?:.*/)?data/([\w.]+(?:-[A-Za-z]\w*)*)-\d{5}-of-\d{5}.*")
_CONVERTED = re.compile(r"(?P<config>[^/]+)/(?P<split>[^/]+)/\d+\.parquet")

Splits = Mapping[str, tuple[str, ...]]
"""Split -> its files, in the order of their names."""


@dataclass(frozen=True)
class Layout:
    """Configurations of a data set, and their splits."""

    configs: Mapping[str, Splits]
    default: str | None = None  # the configuration of those who name none; None: they must


def read_layout(names: Sequence[str], readme: str = "") -> Layout:
    """Return the layout of a data set with these files and this README.md."""
    entries = _configs(readme)
    if entries:
        configs = {_name(entry): _of_entry(entry, names) for entry in entries}
        marked = [_name(entry) for entry in entries if entry.get(DEFAULT)]
        alone = [*configs] if len(configs) == 1 else []
        return Layout(configs, next(iter([*marked, *(DEFAULT,) * (DEFAULT in configs), *alone]), None))
    return Layout({DEFAULT: splits_by_name(names)}, DEFAULT)


def converted_layout(names: Iterable[str]) -> Layout:
    """Return the layout of the branch refs/convert/parquet, where the hub keeps copies as Parquet files."""
    configs: dict[str, dict[str, tuple[str, ...]]] = {}
    for name in sorted(names):
        if match := _CONVERTED.fullmatch(name):
            splits = configs.setdefault(match["config"], {})
            splits[match["split"]] = (*splits.get(match["split"], ()), name)
    alone = [*configs] if len(configs) == 1 else []
    return Layout(configs, DEFAULT if DEFAULT in configs else next(iter(alone), None))


def splits_by_name(names: Sequence[str]) -> Splits:
    """Return the splits that the names of folders and files tell; all are of `train` if they tell none."""
    known = sorted(name for name in names if is_data(name))
    for split_of in (_of_shard, _of_folder, _of_file):
        found: dict[str, tuple[str, ...]] = {}
        for name in known:
            if split := split_of(name):
                found[split] = (*found.get(split, ()), name)
        if found:
            return found
    return {TRAIN: tuple(known)} if known else {}


def is_data(name: str) -> bool:
    """Return True if a file of a data set may have records that mkd reads."""
    parts = name.split("/")
    return (
        bool(records_suffix(name))
        and parts[-1] not in DESCRIPTIONS
        and not any(part[0] in "._" for part in parts if part)
    )


def matching(names: Iterable[str], pattern: str) -> tuple[str, ...]:
    """Return the names that match a pattern: * and ? stop at a slash, ** does not."""
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern.removeprefix("./"))
    regex = "".join(
        parts.get(piece) or (piece if piece.startswith("[") and piece.endswith("]") else re.escape(piece))
        for piece in pieces
    )
    return tuple(sorted(name for name in names if re.fullmatch(regex, name)))


def _configs(readme: str) -> list[Mapping[str, Any]]:
    """Return the entries of `configs` in the header of a README.md."""
    header = _HEADER.match(readme.lstrip("\ufeff"))
    try:
        content = yaml.safe_load(header[1]) if header else None
    except yaml.YAMLError:  # then the names of the files count
        return []
    entries = content.get("configs") if isinstance(content, dict) else None
    return [one for one in entries if isinstance(one, dict)] if isinstance(entries, list) else []


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry.get("config_name", DEFAULT))


def _of_entry(entry: Mapping[str, Any], names: Sequence[str]) -> Splits:
    """Return the splits of one configuration of a README.md."""
    folder = str(entry.get("data_dir") or "").strip("/")
    below = [name for name in names if not folder or name.startswith(f"{folder}/")]
    data = entry.get("data_files")
    if not data:
        return splits_by_name(below)
    listed = data if isinstance(data, list) else [data]
    found: dict[str, tuple[str, ...]] = {}
    for one in listed:
        is_split = isinstance(one, dict)
        split, paths = (str(one.get("split", TRAIN)), one.get("path")) if is_split else (TRAIN, one)
        for path in paths if isinstance(paths, list) else [paths]:
            own = matching(below, f"{folder}/{path}" if folder else str(path))
            before = found.get(split, ())
            found[split] = (*before, *(name for name in own if name not in before))
    return found


def _of_shard(name: str) -> str | None:
    """Return the split of data/SPLIT-00000-of-00001.parquet."""
    match = _SHARD.fullmatch(name)
    return match[1] if match else None


def _of_folder(name: str) -> str | None:
    return next((split for part in name.split("/")[:-1] if (split := _of_words(part))), None)


def _of_file(name: str) -> str | None:
    return _of_words(name.split("/")[-1])


def _of_words(text: str) -> str | None:
    """Return the split whose word is in a text, delimited by other signs than letters."""
    found = set(re.split(r"[^A-Za-z]+", text.lower()))
    return next((split for split, words in WORDS.items() if found & set(words)), None)
