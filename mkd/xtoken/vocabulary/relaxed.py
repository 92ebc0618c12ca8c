"""Pairs of tokens that are nearly the same text: the relaxed map of GOLD and H-KL."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping


def _normal(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def _unspaced(text: str) -> str:
    return _normal(text).lstrip(" ")


def _casefolded(text: str) -> str:
    return _unspaced(text).casefold()


FORMS: tuple[Callable[[str], str], ...] = (_normal, _unspaced, _casefolded)
"""What is ignored, closest first: the Unicode form; the leading space too; the case too."""


def relaxed_pairs(student: Mapping[bytes, int], teacher: Mapping[bytes, int]) -> dict[int, int]:
    """Student id -> teacher id of tokens that differ only in Unicode form (NFKC), leading spaces or case; one-to-one.

    Args: the tokens that have no twin with the same bytes. Closer variants pair first, then smaller ids, which are the more
    frequent tokens of most vocabularies. Tokens that are not UTF-8, and those of spaces alone, stay unpaired.
    """
    pairs: dict[int, int] = {}
    ours, theirs = _texts(student), _texts(teacher)
    for form in FORMS:
        waiting: dict[str, list[int]] = {}
        for token in sorted(theirs, reverse=True):  # so that pop() gives the smallest id
            waiting.setdefault(form(theirs[token]), []).append(token)
        for token in sorted(ours):
            candidates = waiting.get(form(ours[token]))
            if candidates:
                pairs[token] = candidates.pop()
        ours = {token: text for token, text in ours.items() if token not in pairs}
        taken = set(pairs.values())
        theirs = {token: text for token, text in theirs.items() if token not in taken}
    return pairs


def _texts(tokens: Mapping[bytes, int]) -> dict[int, str]:
    texts = {}
    for own, token in tokens.items():
        try:
            text = own.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if _casefolded(text):
            texts[token] = text
    return texts
