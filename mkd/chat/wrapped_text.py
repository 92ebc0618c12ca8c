"""Lines of a column: text that grows, wrapped at a number of terminal cells."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, field

TAB = 4
HIDDEN = "\N{REPLACEMENT CHARACTER}"


def printable(text: str) -> str:
    """Return text without control characters, which could change the terminal, but for line ends."""
    text = text.replace("\r\n", "\n").replace("\t", " " * TAB)
    return "".join(one if one == "\n" or unicodedata.category(one) != "Cc" else HIDDEN for one in text)


def width_of(text: str) -> int:
    """Return the number of terminal cells of a text without line ends."""
    return sum(map(_cells, text))


def _cells(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


@dataclass
class WrappedText:
    """Text in lines of at most `width` cells. Only its last paragraph is wrapped again as it grows."""

    width: int
    _done: list[str] = field(default_factory=list)  # lines of finished paragraphs
    _open: str = ""  # the last paragraph

    def add(self, text: str) -> None:
        """Add printable text."""
        *finished, self._open = (self._open + text).split("\n")
        for paragraph in finished:
            self._done += wrap(paragraph, self.width)

    @property
    def lines(self) -> list[str]:
        """All lines; the last one still grows."""
        return [*self._done, *wrap(self._open, self.width)]


def wrap(paragraph: str, width: int) -> list[str]:
    """Return the lines of a paragraph, at least one, broken at blanks where a word fits in a line."""
    lines, line, used = [], "", 0
    for character in paragraph:
        cells = _cells(character)
        if used + cells > width:
            if character == " ":  # a blank at a border is the border
                lines.append(line)
                line, used = "", 0
                continue
            head, blank, word = line.rpartition(" ")
            if blank and head.strip() and width_of(word) + cells <= width:
                lines.append(head)
                line, used = word, width_of(word)
            else:
                lines.append(line)
                line, used = "", 0
        line += character
        used += cells
    return [*lines, line]
