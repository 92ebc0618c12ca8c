"""The data flags: blends, splits, and whether a path is a raw file or a tokenised corpus."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from mkd.config.data_files import RAW_SUFFIXES, is_raw, no_such_file
from mkd.data.store import StoreFiles, TokenStore
from mkd.errors import DataError, UsageError
from mkd.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class Blend:
    """Paths of corpora, and their weights if given."""

    paths: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_blend(values: Sequence[str], flag: str = "--data-path") -> Blend:
    """Parse `W1 P1 W2 P2 ...` (weights of any scale), or paths alone. Raises UsageError for anything else."""
    values = [str(value) for value in values]
    if not values:
        raise UsageError(
            f"{flag} is empty",
            do=f"give {flag} PATH, or {flag} WEIGHT PATH WEIGHT PATH ...",
            code="data-path-empty",
        )
    if _number(values[0]) is not None and len(values) % 2 and len(values) > 1:
        raise UsageError(
            f"{flag} has {len(values)} values: a weight or a path is missing",
            f"the list starts with the number {values[0]}, "
            f"so it is read as {flag} WEIGHT PATH WEIGHT PATH ...",
            "give every path a weight, or none; a path that is a number is written ./1",
            code="blend-incomplete",
        )
    if len(values) == 1 or _number(values[0]) is None:
        return Blend(tuple(values), None)
    weights = tuple(map(_number, values[::2]))
    for value, weight in zip(values[::2], weights, strict=True):
        if weight is None or not 0 < weight < math.inf:
            raise UsageError(
                f"{flag}: {value} stands where a positive weight is expected",
                f"the list starts with a number, so it is read as {flag} WEIGHT PATH WEIGHT PATH ...",
                "give every path a weight, or none",
                code="blend-weight-not-positive",
            )
    return Blend(tuple(values[1::2]), weights)


def all_tokenised(*flags: Sequence[str]) -> bool:
    """Return True if the values of data flags name corpora, and all are tokenised."""
    paths: list[str] = []
    for values in flags:
        with suppress(UsageError):  # reported where the data are checked
            paths += parse_blend(values).paths if values else ()
    return bool(paths) and not any(map(is_raw, paths))


def find_prefix(path: str, flag: str = "--data-path") -> str:
    """Return the prefix of the tokenised corpus at `path` (with or without .bin).

    Raises DataError, which lists the paths tried, if there is none.
    """
    candidates = [path, *(path.removesuffix(end) for end in (".bin", ".idx") if path.endswith(end))]
    for prefix in candidates:
        files = StoreFiles(prefix)
        if files.bin.is_file() and files.idx.is_file():
            return prefix
        if files.bin.is_file() or files.idx.is_file():
            there, missing = (files.bin, files.idx) if files.bin.is_file() else (files.idx, files.bin)
            raise DataError(
                f"{flag} {path}: {missing} is missing",
                f"{there} is there, and a corpus is the pair of both",
                "copy the missing file too, or make the pair again with `mkd preprocess`",
                code="corpus-file-missing",
            )
    looked_for = ", ".join(f"{prefix}.bin with {prefix}.idx" for prefix in candidates)
    raise no_such_file(path, flag, f"{looked_for}; files of records end in {', '.join(RAW_SUFFIXES)}")


def require_vocabulary(store: TokenStore, tokenizer: Tokenizer, name: str) -> None:
    """Raise DataError if the corpus, called `name`, is known to come from another tokenizer."""
    known = store.meta.get("vocabulary_fingerprint", tokenizer.vocabulary_fingerprint)
    if known != tokenizer.vocabulary_fingerprint:
        raise DataError(
            f"{name} was tokenised with another tokenizer",
            f"{store.prefix}.meta.json describes another vocabulary, so the ids mean other strings",
            "tokenise the raw files with this run's tokenizer: `mkd preprocess`",
            code="corpus-of-another-tokenizer",
        )


def require_text(store: TokenStore, name: str) -> None:
    """Raise DataError if the corpus, called `name`, holds conversations.

    No cross-tokenizer teacher can read them from tokens: they are in the student's chat template.
    """
    if "messages" in store.meta.get("kinds", ()):
        raise DataError(
            f"{name} is a tokenised corpus of conversations, and a teacher has another tokenizer",
            "the conversations are in the student's chat template, "
            "and this teacher was trained on another one",
            "name the raw file of the conversations instead: each model then reads them in its own template",
            code="corpus-of-conversations-for-teacher",
        )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
