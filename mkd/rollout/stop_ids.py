"""The tokens that end a completion, from the files of a model."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from pathlib import Path

from mkd.tokenizers.tokenizer import Tokenizer

LOG = logging.getLogger("mkd")
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


def warn_of_unlisted_eos(stops: Collection[int], tokenizer: Tokenizer) -> None:
    """Warn if completions do not end at the token that ends stored texts, which teach a student to stop."""
    eos = tokenizer.eos_id
    if eos is not None and eos not in stops:
        ends = " or ".join(f"{i} {tokenizer.decode([i])!r}" for i in sorted(stops))
        LOG.warning(
            "completions end at %s, but stored texts end with %d %r, the EOS of the tokenizer. A student "
            "that learned from them does not stop. List both in eos_token_id of its generation_config.json",
            *(ends, eos, tokenizer.decode([eos])),
        )
