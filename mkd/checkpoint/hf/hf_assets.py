"""The small files of a Hugging Face model folder: configuration, tokenizer, templates."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

IMAGE_ASSETS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
MODEL_ASSETS = ("config.json", "generation_config.json", *IMAGE_ASSETS)
SENTENCEPIECE_ASSET = "tokenizer.model"
TOKENIZER_ASSETS = (
    *("tokenizer.json", "tokenizer_config.json", SENTENCEPIECE_ASSET, "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "tiktoken.model"),
)
TOKENIZER_CODE = "tokenization_*.py"  # that tokenizer_config.json names; mkd never runs it
TEMPLATE_FOLDER = "additional_chat_templates"  # where a tokenizer keeps several templates
TEMPLATES = "*.jinja"
TOKENIZER_PATTERNS = (*TOKENIZER_ASSETS, TOKENIZER_CODE, f"{TEMPLATE_FOLDER}/{TEMPLATES}")


class SavesFiles(Protocol):
    """Settings that a run has changed, such as those of an image processor."""

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
class HFAssets:
    """Sources of the small files of a written model; its tokenizer may come from another folder."""

    model: Path  # folder with config.json
    tokenizer: Path | None  # folder with a tokenizer, or a SentencePiece file; None: no tokenizer
    changed: SavesFiles | None = None  # writes over the copies; None: they are the source's

    @classmethod
    def of(cls, folder: str | Path) -> HFAssets:
        """Take all files from one model's folder."""
        return cls(Path(folder), Path(folder))

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders that are read and must not be written to."""
        if self.tokenizer is None:
            return (self.model,)
        return self.model, self.tokenizer.parent if self.tokenizer.is_file() else self.tokenizer

    def files(self) -> dict[str, Path]:
        """Return name in the written folder -> source file, for every file that exists."""
        found = {name: self.model / name for name in MODEL_ASSETS}
        if self.tokenizer is not None and self.tokenizer.is_file():
            found[SENTENCEPIECE_ASSET] = self.tokenizer
        elif self.tokenizer is not None:
            found |= {name: self.tokenizer / name for name in TOKENIZER_ASSETS}
            found |= {path.name: path for path in self.tokenizer.glob(TOKENIZER_CODE)}
            templates = (self.tokenizer / TEMPLATE_FOLDER).glob(TEMPLATES)
            found |= {f"{TEMPLATE_FOLDER}/{path.name}": path for path in templates}
        return {name: path for name, path in found.items() if path.exists()}

    @property
    def replaced(self) -> frozenset[str]:
        """Names of the files and folders of another model that must not stay beside these.

        A tokenizer replaces all tokenizer files, because a mixture of two would be a third one. Without a
        tokenizer those files stay.
        """
        has_tokenizer = not self.files().keys().isdisjoint(TOKENIZER_ASSETS)
        return frozenset((*MODEL_ASSETS, *((*TOKENIZER_ASSETS, TEMPLATE_FOLDER) if has_tokenizer else ())))

    def copy_to(self, folder: Path) -> None:
        """Copy every file to a new folder, following the symbolic links of a hub cache."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, path in self.files().items():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)
        if self.changed is not None:
            self.changed.save(folder)
