"""Texts before they are tokenised: short ones joined to samples of a least length (lazy character packing), huge ones cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mkd.data.documents import MAX_CHARACTERS, Row, parse_row
from mkd.errors import DataError


def join_texts(rows: Iterable[tuple[int, Row]], characters_per_sample: int) -> Iterator[tuple[int, Row]]:
    """Consecutive text records joined with a newline until they have `characters_per_sample` characters.

    A joined record has the number of its first row. Records of other kinds, and malformed ones, pass unchanged and end the
    sample before them; the last sample of a file may be shorter. Samples that are blank are left out.
    """
    texts, first, size = [], 0, 0
    for number, row in rows:
        text = _text(row)
        if text is not None:
            first = first if texts else number
            texts.append(text)
            size += len(text) + (len(texts) > 1)
        if text is None or size >= characters_per_sample:
            yield from _sample(first, texts)
            texts, size = [], 0
        if text is None:
            yield number, row
    yield from _sample(first, texts)


def cut_texts(rows: Iterable[tuple[int, Row]]) -> Iterator[tuple[int, Row]]:
    """The rows; a text of more than MAX_CHARACTERS becomes several documents, whose texts join to it.

    It is cut behind the last line end of the second half of what fits, else before the last blank, else anywhere.
    """
    for number, row in rows:
        text = _text(row) if _size(row) > MAX_CHARACTERS else None
        if text is None:
            yield number, row
            continue
        start = 0
        while start < len(text):
            end = _cut(text, start)
            yield number, {"text": text[start:end]}
            start = end


def _size(row: Row) -> int:
    """At least the characters of its text."""
    if isinstance(row, bytes):
        return len(row)
    text = None if isinstance(row, DataError) else row.get("text")
    return len(text) if isinstance(text, str | bytes) else 0


def _cut(text: str, start: int) -> int:
    end = start + MAX_CHARACTERS
    if end >= len(text):
        return len(text)
    half = start + MAX_CHARACTERS // 2
    line_end = text.rfind("\n", half, end)
    blank = text.rfind(" ", half, end)
    return line_end + 1 if line_end >= 0 else blank if blank >= 0 else end


def _text(row: Row) -> str | None:
    try:
        record = parse_row(row)
    except DataError:
        return None  # the encoder says what is wrong with it
    return record.values[0] if record.kind == "text" else None


def _sample(first: int, texts: list[str]) -> Iterator[tuple[int, Row]]:
    joined = "\n".join(texts)
    if joined.strip():
        yield first, {"text": joined}
