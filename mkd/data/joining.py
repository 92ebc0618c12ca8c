"""Short texts joined to samples of a least length, before they are tokenised: lazy character packing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mkd.data.documents import Row, parse_row
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
