"""The bytes of a text that each of its tokens spells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mkd.errors import DataError


@dataclass(frozen=True)
class EncodedText:
    """The tokens of a text, and the bytes [start, end) of `text.encode("utf-8")` that each spells.

    Spans are contiguous and do not overlap. Tokens that cannot be told apart in the text share a span: pieces
    of a character that the tokenizer changed, or a blank that it put before the text and the next token. A
    token without text (BOS, EOS) has start == end == -1.
    """

    ids: np.ndarray  # [n] int64
    starts: np.ndarray  # [n] int64
    ends: np.ndarray  # [n] int64

    def __len__(self) -> int:
        return len(self.ids)


def utf8(text: str) -> bytes:
    """Return the UTF-8 bytes of `text`. Raises DataError if it has none."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"character {error.start} of the text is a lone surrogate (U+{ord(text[error.start]):04X})",
            "half of a character has no bytes, so that no tokenizer can encode it",
            "repair the text, for example with text.encode('utf-8', 'replace').decode()",
            code="record-text-damaged",
        ) from error


def locate(
    ids: Sequence[int],
    in_text: np.ndarray,  # [n] bool, False for tokens that the tokenizer added around the text
    pieces: Sequence[bytes | None],  # [vocab_size], the bytes that each id spells
    data: bytes,  # the text
    offsets: Callable[[], np.ndarray],  # -> [n, 2] int64, spans in bytes according to the tokenizer's library
) -> EncodedText:
    """Return the tokens with their spans.

    If the pieces join to exactly the text, they give the spans, even inside a character. They also do if only
    blanks were added, as SentencePiece does before the text and after control tokens. Otherwise a normalizer
    changed the text, or a token spells no known bytes. Then the library's offsets give the spans, and tokens
    that they do not separate share one.
    """
    ids = np.asarray(ids, dtype=np.int64)
    starts, ends = np.full((2, len(ids)), -1, dtype=np.int64)
    inside = np.flatnonzero(in_text)
    if len(inside):
        parts = [pieces[i] for i in ids[inside].tolist()]
        last, closed = _from_pieces(parts, data), np.ones(len(parts), dtype=bool)
        if last is None:
            last, closed = _from_offsets(offsets()[inside], parts, data)
        starts[inside], ends[inside] = _shared(last, closed)
    return EncodedText(ids, starts, ends)


def byte_offsets(text: str, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Convert offsets in characters of `text` to offsets in its bytes, int64 [n, 2]."""
    code_points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    sizes = 1 + (code_points >= 0x80).astype(np.int64) + (code_points >= 0x800) + (code_points >= 0x10000)
    return np.append(0, np.cumsum(sizes))[np.asarray(offsets, dtype=np.int64).reshape(-1, 2)]


def token_groups(encoded: EncodedText) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Group the tokens that share a span; tokens without text are in no group.

    Return (first token of each group and the end of the last one [g + 1], start [g] and end [g] in bytes),
    int64.
    """
    inside = np.flatnonzero(encoded.ends > 0)  # neither -1 nor the empty span of tokens of an empty text
    ends = encoded.ends[inside]
    last = np.append(ends[1:] != ends[:-1], True)[: len(ends)]
    tokens = np.append(inside[:1], inside[last] + 1)
    return tokens, encoded.starts[inside][last], ends[last]


def _from_pieces(pieces: Sequence[bytes | None], data: bytes) -> np.ndarray | None:
    """Return the ends [n] int64 of pieces that spell the text, apart from added blanks; else None."""
    parts = [piece for piece in pieces if piece is not None]
    if len(parts) < len(pieces):
        return None
    ends = np.cumsum([len(part) for part in parts])
    joined = b"".join(parts)
    if joined in (data, b" " + data):
        return ends - (len(joined) - len(data))
    end = 0
    for k, part in enumerate(parts):
        if not data.startswith(part, end):
            if not (part.startswith(b" ") and data.startswith(part[1:], end)):
                return None
            end -= 1
        end += len(part)
        ends[k] = end
    return ends if end == len(data) else None


def _from_offsets(
    offsets: np.ndarray, parts: Sequence[bytes | None], data: bytes
) -> tuple[np.ndarray, np.ndarray]:
    """Return (ends [n] int64, closed [n] bool).

    A token is closed if no later token reaches back over its end. Characters that no token claims belong to
    the token before them: a normalizer composed them with its last character, or dropped them. Blanks belong
    to the token after them. But if the token before them ends with a blank, they may belong to that token.
    The library may have cut them off (`trim_offsets`), so its end is unknown.
    """
    last = np.maximum.accumulate(offsets[:, 1])
    following = np.append(np.minimum.accumulate(offsets[::-1, 0])[::-1][1:], len(data))
    closed = following >= last
    for k in np.flatnonzero(following > last).tolist():
        unclaimed = data[last[k] : following[k]].decode()
        composed = unclaimed.rstrip()
        last[k] += len(composed.encode())
        part = parts[k] or b""
        closed[k] = not (any(map(str.isspace, composed)) or (composed != unclaimed and part[-1:].isspace()))
    return last, closed


def _shared(last: np.ndarray, closed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (starts, ends) [n]: spans end at closed tokens; a token of no width shares the next span."""
    cuts = np.flatnonzero(closed & (last < last[-1]))
    cuts = np.append(cuts[np.diff(last[cuts], prepend=0) > 0], len(last) - 1)
    sizes = np.diff(cuts, prepend=-1)
    ends = last[cuts]
    return np.repeat(np.append(0, ends[:-1]), sizes), np.repeat(ends, sizes)
