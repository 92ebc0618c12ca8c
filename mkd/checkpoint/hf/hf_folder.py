"""A Hugging Face folder that is about to be written: what it holds, and how a new model replaces it.

FOLDER/.mkd-new/    the new model until it is complete
FOLDER/.mkd-old/    the files that it replaces, until all of its own have their names

Nothing of an older model is touched before the new one is complete, and nothing is deleted before the new one
is in place. A failure in between puts everything back. After a kill in between, both models are on the disk.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from mkd.checkpoint.hf.hf_assets import (
    INDEX_FILE,
    MODEL_ASSETS,
    SINGLE_FILE,
    TEMPLATE_FOLDER,
    TOKENIZER_ASSETS,
    TOKENIZER_CODE,
)
from mkd.errors import UsageError

NEW, OLD = ".mkd-new", ".mkd-old"
SHARD_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
OTHER_WEIGHTS = re.compile(
    r".*\.safetensors|pytorch_model.*\.bin|.*\.bin\.index\.json|.*\.gguf|adapter_config\.json|adapter_model\.bin"
)
NUM_SHOWN = 3
PLANNED = "mkd_planned"
"""Key of the config.json that `mkd init` writes for a student without weights, to plan its run."""


def model_files(folder: Path) -> list[Path]:
    """Return the files in `folder` that belong to a model or its tokenizer, also those set aside."""
    return sorted(path for place in (folder, folder / OLD) for path in _model_files(place))


def _model_files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir() if folder.is_dir() else ():
        is_weights = SHARD_FILE.fullmatch(path.name) or OTHER_WEIGHTS.fullmatch(path.name)
        if is_weights or path.name in MODEL_ASSETS or _is_of_tokenizer(path.name):
            yield path


def _is_of_tokenizer(name: str) -> bool:
    return name in (*TOKENIZER_ASSETS, TEMPLATE_FOLDER) or fnmatch(name, TOKENIZER_CODE)


def model_in_the_way(flag: str, folder: Path) -> UsageError | None:
    """Return an error if `folder`, the value of `flag`, already holds a model; None if it does not."""
    found = [path.name for path in model_files(folder)]
    if not found or (found == ["config.json"] and is_planned(folder)):
        return None
    more = f" and {len(found) - NUM_SHOWN} more" if len(found) > NUM_SHOWN else ""
    what = f"{flag} {folder} holds a model: {', '.join(found[:NUM_SHOWN])}{more}"
    do = "choose another folder, or give --overwrite to replace the model"
    return UsageError(what, "its files would be replaced", do, code="already-exists")


def is_planned(folder: Path) -> bool:
    """Return True if config.json describes a student that is still to be cut: it has the key PLANNED."""
    try:
        return bool(json.loads((folder / "config.json").read_text(encoding="utf-8")).get(PLANNED))
    except (OSError, ValueError, AttributeError):
        return False


def start_writing(folder: Path) -> Path:
    """Return the empty folder for the files of a new model. Remove what a killed export has left in it."""
    stage = folder / NEW
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    return stage


def give_up(folder: Path) -> None:
    """Remove the files of a new model that failed."""
    shutil.rmtree(folder / NEW, ignore_errors=True)


def publish(folder: Path) -> None:
    """Put the complete model of `start_writing` in place of the old one, of which no file stays.

    A tokenizer replaces all tokenizer files, because a mixture of two would be a third one. If the new model
    has none, those files stay.

    Meanwhile the folder has neither an index nor a single file, so that no reader sees a mixture. Raises
    OSError after everything is back in its place.
    """
    stage, old = folder / NEW, folder / OLD
    new = sorted((path.name for path in stage.iterdir()), key=lambda name: name in (INDEX_FILE, SINGLE_FILE))
    brings_tokenizer = any(map(_is_of_tokenizer, new))
    going = [path.name for path in _model_files(folder)]
    going = [name for name in going if brings_tokenizer or not _is_of_tokenizer(name)]
    going += [name for name in set(new) - set(going) if _exists(folder / name)]
    going.sort(key=lambda name: name not in (INDEX_FILE, SINGLE_FILE))
    old.mkdir(exist_ok=True)
    moves = [(folder / name, old / name) for name in going] + [(stage / name, folder / name) for name in new]
    done: list[tuple[Path, Path]] = []
    try:
        for source, target in moves:
            _move(source, target)
            done.append((source, target))
    except OSError:
        for source, target in reversed(done):
            with suppress(OSError):
                _move(target, source)
        with suppress(OSError):
            old.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(stage, ignore_errors=True)


def _move(source: Path, target: Path) -> None:
    """Rename a file or a folder. Replace what an earlier export that was killed has left at `target`."""
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    source.replace(target)


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()
