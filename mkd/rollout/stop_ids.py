"""The tokens that end a completion, from the files of a model."""

from __future__ import annotations

import json
from pathlib import Path

from mkd.tokenizers.tokenizer import Tokenizer

FILES = ("generation_config.json", "config.json")


def stop_ids(folder: Path, tokenizer: Tokenizer | None = None) -> frozenset[int]:
    """Return the ids that end a text of the model in `folder`; empty if nothing names one.

    They are `eos_token_id` of generation_config.json, else of config.json, else the EOS of `tokenizer`.
    """
    for name in FILES:
        path = folder / name
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.exists() else None
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value])
    eos = None if tokenizer is None else tokenizer.eos_id
    return frozenset() if eos is None else frozenset({eos})
