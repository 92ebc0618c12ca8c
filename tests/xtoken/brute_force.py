"""The aligner of the design as a plain walk, and texts that are hard to align."""

from __future__ import annotations

import random
import unicodedata

from mkd.tokenizers.spans import EncodedText

FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"  # one emoji of seven code points
FRAGMENTS = [
    "the ",
    "Tokenization",
    " of",
    "  ",
    "\n\n",
    "\t",
    "\r\n",
    "don't",
    "1234567",
    "3.14159",
    " 0",
    "{x: [1, 2]}",
    "\0",
    "\x7f",
    "\u4f60\u597d\u4e16\u754c",
    "\u3053\u3093\u306b\u3061\u306f",
    "\uc548\ub155",
    "\u041f\u0440\u0438\u0432\u0435\u0442",
    "\u0645\u0631\u062d\u0628\u0627",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "e\u0301",
    "\u00e9",
    "n\u0303o",
    "\u1e9b\u0323",
    FAMILY,
    "\U0001f1e9\U0001f1ea",
    "\U0001f44d\U0001f3fd",
    "\ufeff",
    "\u00a0",
    "\u2028",
    "\u200b",
    "\u2581",
    "\U00020000",
    "<s>",
    "<|im_end|>",
    "<think>",
    "<0x41>",
    "def f(x):\n    return x\n",
    "\u212b",
    "\ufb01",
    "\uff21",
    "\u0958",
    "\ud55c\u1100\u1161",
]


def random_text(generator: random.Random, pieces: int = 30) -> str:
    """Return words, scripts, emoji, combining marks, digits, control characters, and any other code point."""
    return "".join(
        generator.choice(FRAGMENTS) if generator.random() < 0.8 else _code_point(generator)
        for _ in range(generator.randrange(pieces))
    )


def _code_point(generator: random.Random) -> str:
    while True:
        character = chr(generator.randrange(0x110000))
        if unicodedata.category(character) != "Cs":
            return character


def walk(student: EncodedText, teacher: EncodedText) -> list[list[int]]:
    """Return the chunks of two tokenizations of one whole text.

    The side that ends first steps on, until both end alike.
    """
    ours, theirs = _collapsed(student), _collapsed(teacher)
    chunks, i, j, i0, j0 = [], 0, 0, 0, 0
    while i < len(ours) and j < len(theirs):
        if ours[i][2] < theirs[j][2]:
            i += 1
        elif ours[i][2] > theirs[j][2]:
            j += 1
        else:
            chunks.append([ours[i0][0], ours[i][1], theirs[j0][0], theirs[j][1]])
            i, j = i + 1, j + 1
            i0, j0 = i, j
    return chunks


def _collapsed(encoded: EncodedText) -> list[tuple[int, int, int]]:
    """Return (first token, end, end in bytes), the tokens of one span together."""
    groups: list[tuple[int, int, int]] = []
    previous = None
    for token, span in enumerate(zip(encoded.starts.tolist(), encoded.ends.tolist(), strict=True)):
        if span[1] <= 0:
            continue
        if span == previous:
            groups[-1] = (groups[-1][0], token + 1, span[1])
        else:
            groups.append((token, token + 1, span[1]))
        previous = span
    return groups


def check_spans(encoded: EncodedText, data: bytes) -> None:
    """Check that spans follow each other without gaps inside the text; tokens of one span are neighbours."""
    end, span = 0, (0, 0)
    for start, stop in zip(encoded.starts.tolist(), encoded.ends.tolist(), strict=True):
        if stop == -1:
            assert start == -1
        elif (start, stop) != span:
            assert start == end < stop <= len(data)
            end, span = stop, (start, stop)


def check_chunks(chunks, student: EncodedText, teacher: EncodedText) -> None:
    """Check that every chunk covers the same bytes on both sides."""
    for a, b, c, d in chunks:
        assert (student.starts[a], student.ends[b - 1]) == (teacher.starts[c], teacher.ends[d - 1])
