"""The licence that a model's folder names: in the head of its README.md, or in a file of its own."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mkd.release.training_record import SourceModel

CARD = "README.md"
FENCE = "---"
LICENCE_FILES = ("LICENSE*", "LICENCE*", "USE_POLICY*", "NOTICE*")
LICENCE_KEYS = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class Licence:
    """Terms of a model, as its folder says."""

    model: SourceModel
    entries: dict[str, str]  # those of LICENCE_KEYS in the head of its card
    files: tuple[str, ...]  # names of files with terms

    @property
    def is_stated(self) -> bool:
        """True if the card of the model names a licence."""
        return "license" in self.entries

    def __str__(self) -> str:
        parts = [self.entries.get("license_name") or self.entries.get("license") or ""]
        parts += [f"file {name}" for name in self.files]
        return ", ".join(filter(None, parts)) or "its folder names no licence"


def find_licence(model: SourceModel) -> Licence:
    """Return the terms in a model's folder. For a hub id, look in the hub's cache alone."""
    folder = _folder_of(model)
    if folder is None:
        return Licence(model, {}, ())
    head = read_head(folder / CARD)
    entries = {key: str(head[key]) for key in LICENCE_KEYS if isinstance(head.get(key), str)}
    files = sorted(path.name for pattern in LICENCE_FILES for path in folder.glob(pattern) if path.is_file())
    return Licence(model, entries, tuple(files))


def read_head(card: Path) -> dict[str, Any]:
    """Return the YAML head of a model card; {} without one."""
    try:
        lines = card.read_text(encoding="utf-8").splitlines()
        if lines[:1] != [FENCE] or FENCE not in lines[1:]:
            return {}
        head = yaml.safe_load("\n".join(lines[1 : lines.index(FENCE, 1)]))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return head if isinstance(head, dict) else {}


def _folder_of(model: SourceModel) -> Path | None:
    """Return the folder of a model on this machine; None if it is elsewhere."""
    folder = Path(model.place).expanduser()
    if folder.is_dir():
        return folder
    if model.hub_id is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    with suppress(ValueError, OSError):
        cached = try_to_load_from_cache(model.hub_id, "config.json")
        if isinstance(cached, str):
            return Path(cached).parent
    return None
