"""The tokens that end a completion, from the files of a model."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from mkd.errors import UsageError
from mkd.tokenizers.tokenizer import Tokenizer

FILES = ("generation_config.json", "config.json")
SHOWN_CHARACTERS = 80  # of a value that holds no ids


def stop_ids(folder: Path, tokenizer: Tokenizer | None = None) -> frozenset[int]:
    """Return the ids that end a text of the model in `folder`; empty if nothing names one.

    They are `eos_token_id` of generation_config.json, else of config.json, else the EOS of `tokenizer`.
    Raises UsageError for values that are not ids.
    """
    for name in FILES:
        path = folder / name
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.exists() else None
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(one) is int and one >= 0 for one in ids):
                what = f"eos_token_id of {path} is {json.dumps(value)[:SHOWN_CHARACTERS]}"
                raise UsageError(
                    what,
                    "completions end at these ids",
                    "write an id or a list of ids",
                    code="stop-ids-not-valid",
                )
            return frozenset(ids)
    eos = None if tokenizer is None else tokenizer.eos_id
    return frozenset() if eos is None else frozenset({eos})


def require_tokens(stops: Collection[int], tokenizer: Tokenizer, num_ids: int, role: str) -> None:
    """Raise UsageError for stop ids of the model `role` that are not tokens, or beyond its `num_ids` rows."""
    known = set(tokenizer.vocabulary.values())
    unknown = sorted(one for one in stops if one >= num_ids or one not in known)
    if unknown:
        raise UsageError(
            f"eos_token_id of the {role} has {tokenizer.named(unknown)}: the tokenizer knows {len(known)} "
            f"ids, the models {num_ids}",
            "completions would never end there: such an id is never sampled",
            "remove it from eos_token_id of generation_config.json (or config.json), or correct it",
            code="stop-ids-not-valid",
        )


def unlisted_eos(stops: Collection[int], tokenizer: Tokenizer) -> str | None:
    """Return a note if completions do not end at the token that ends stored texts, which teach to stop."""
    eos = tokenizer.eos_id
    if eos is None or eos in stops:
        return None
    ends, stored = tokenizer.named(stops), tokenizer.named((eos,))
    return (
        f"note: completions end at {ends}, but plain texts of --data-path end with {stored}, the EOS of the "
        "tokenizer. A student that learned from them does not stop. List both in eos_token_id of "
        "generation_config.json"
    )
