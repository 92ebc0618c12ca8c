"""The small files of a Hugging Face model folder: configuration, tokenizer, templates."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from mkd.checkpoint.hf.hf_changes import IMAGE_ASSETS, SavesFiles

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

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


@dataclass(frozen=True)
class HFAssets:
    """Sources of the small files of a written model; its tokenizer may come from another folder."""

    model: Path  # folder with config.json
    tokenizer: Path | None  # folder with a tokenizer, or a SentencePiece file; None: no tokenizer
    changes: tuple[SavesFiles, ...] = ()  # write over the copies, in order

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

    def copy_to(self, folder: Path) -> None:
        """Copy every file to a new folder, following the symbolic links of a hub cache."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, path in self.files().items():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)
        for change in self.changes:
            change.save(folder)
