"""Changes of a run to the small files of its student: image processor, stop ids, class of the tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mkd.families.config_values import PART_OBJECTS

IMAGE_ASSETS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
GENERATION_FILE, CONFIG_FILE = "generation_config.json", "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
STOP_KEY = "eos_token_id"


class SavesFiles(Protocol):
    """Settings that a run has changed."""

    def save(self, folder: Path) -> None:
        """Write the changed settings into a folder that has the files of the source."""


@dataclass(frozen=True)
class SavedProcessor:
    """The image processor in a folder, as the run left it that saved the folder."""

    source: Path

    def save(self, folder: Path) -> None:
        """Copy its files, if there are any."""
        for name in IMAGE_ASSETS:
            if (self.source / name).is_file():
                shutil.copyfile(self.source / name, folder / name)


@dataclass(frozen=True)
class StopIds:
    """Tokens that end the texts on which a student was trained: generation must stop there too."""

    ids: tuple[int, ...]  # the most important one first

    @classmethod
    def of_folder(cls, folder: Path) -> StopIds:
        """Return the stop ids of a model: those of its generation_config.json, else of its config.json."""
        found = (listed_ids(_read(folder / name)) for name in (GENERATION_FILE, CONFIG_FILE))
        return cls(next(filter(None, found), ()))

    def save(self, folder: Path) -> None:
        """Put those that are missing before the ids of config.json and of generation_config.json."""
        for name in (GENERATION_FILE, CONFIG_FILE):
            content = _read(folder / name)
            if content:
                text = json.dumps(self.added_to(content), indent=2, ensure_ascii=False) + "\n"
                (folder / name).write_text(text, encoding="utf-8")

    def added_to(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return a configuration with the ids, also in the text model's part of a model with images."""
        changed = dict(content)
        old = listed_ids(content)
        if not set(self.ids) <= set(old):
            ids = [*self.ids, *(one for one in old if one not in self.ids)]
            changed[STOP_KEY] = ids if len(ids) > 1 else ids[0]
        for part in PART_OBJECTS:
            if isinstance(content.get(part), dict) and STOP_KEY in content[part]:
                changed[part] = self.added_to(content[part])
        return changed


@dataclass(frozen=True)
class PlainTokenizer:
    """A tokenizer.json that transformers must read as it is: its own class would give other ids."""

    def save(self, folder: Path) -> None:
        """Name the class that reads the file."""
        path = folder / TOKENIZER_CONFIG
        content = _read(path) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def listed_ids(content: Mapping[str, Any]) -> tuple[int, ...]:
    """Return `eos_token_id` of a configuration as ids; () if it has none."""
    value = content.get(STOP_KEY)
    values = value if isinstance(value, list) else [value]
    return tuple(one for one in values if type(one) is int)


def _read(path: Path) -> dict[str, Any]:
    """Return a JSON object; {} for a file that is not there or holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
