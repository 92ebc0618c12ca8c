"""The small files of a Hugging Face model folder: configuration, tokenizer, templates."""

from __future__ import annotations

import shutil
from pathlib import Path

ASSETS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def copy_hf_assets(source: Path, destination: Path) -> None:
    """Copy every file of `ASSETS` that `source` has; follows the symbolic links of a hub cache."""
    destination.mkdir(parents=True, exist_ok=True)
    for name in ASSETS:
        if (source / name).exists():
            shutil.copyfile(source / name, destination / name)
