"""Answers as they grow: one after the other, or student and teacher in two columns."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Protocol, TextIO

from mkd.chat.answer import INTERRUPTED, Answer
from mkd.chat.interruption import Ranks
from mkd.chat.wrapped_text import WrappedText, printable, width_of

LEAST_COLUMNS = 60  # of a terminal with two columns
BORDER = " | "
SPARE_ROWS = 3  # of the terminal below the part that is drawn again
STYLES = {"student": "1;34", "teacher": "1;32", "you": "1", "note": "2"}


class View(Protocol):
    """Shows answers while they are written."""

    def show(self, answers: Sequence[Answer], ranks: Ranks) -> None:
        """Run the answers to their ends, or to an interruption, and print them. Collective."""


def styled(text: str, style: str, out: TextIO) -> str:
    """Return text with the style of a role for a terminal, plain for a pipe or with NO_COLOR."""
    if not out.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m"


def view_for(columns: str, num_models: int) -> View:
    """Return the view of --columns: two columns need a terminal that is wide enough."""
    out = sys.stdout
    wide = out.isatty() and shutil.get_terminal_size().columns >= LEAST_COLUMNS
    is_wanted = num_models > 1 and (columns == "on" or (columns == "auto" and wide))
    return Columns(out) if is_wanted else OneAfterTheOther(out)


class OneAfterTheOther:
    """Prints `role> text` of each model, token by token. Pipes can read it."""

    def __init__(self, out: TextIO):
        self._out = out

    def show(self, answers: Sequence[Answer], ranks: Ranks) -> None:
        """Write one answer after the other. An interruption ends the present one and those after it."""
        for answer in answers:
            self._print(styled(f"{answer.writer.role}> ", answer.writer.role, self._out), ranks)
            while answer.end is None:
                piece = answer.interrupt() if ranks.is_interrupted() else answer.advance()
                self._print(piece, ranks)
            self._print("\n" if not answer.text.endswith("\n") else "", ranks)
            self._print("".join(f"{line}\n" for line in _notes([answer], self._out)), ranks)

    def _print(self, text: str, ranks: Ranks) -> None:
        if ranks.is_first and text:
            isatty = self._out.isatty()
            self._out.write(text if not isatty or text.startswith("\x1b[") else printable(text))
            self._out.flush()


class Columns:
    """Draws two answers beside each other while both grow.

    Rows that both have finished are printed once. The others are drawn again with every token; an answer that
    is a screen ahead waits for the other one.
    """

    def __init__(self, out: TextIO):
        self._out = out
        self._first, self._drawn = 0, 0  # first row that still changes; rows on the screen from there on

    def show(self, answers: Sequence[Answer], ranks: Ranks) -> None:
        """Write both answers token by token in turn."""
        size = shutil.get_terminal_size()
        width = (size.columns - len(BORDER)) // len(answers)
        most_rows = max(1, size.lines - SPARE_ROWS)
        texts = [WrappedText(width) for _ in answers]
        self._first = self._drawn = 0
        heads = [(one.writer.role, one.writer.role) for one in answers]
        self._write(self._row(heads, width) + "\n", ranks)
        while any(one.end is None for one in answers):
            is_interrupted = ranks.is_interrupted()
            for answer, text in zip(answers, texts, strict=True):
                is_ahead = len(text.lines) - self._first >= most_rows
                others_grow = any(one.end is None for one in answers if one is not answer)
                if answer.end is None and not (is_ahead and others_grow and not is_interrupted):
                    text.add(printable(answer.interrupt() if is_interrupted else answer.advance()))
            self._draw(answers, texts, width, ranks)
        self._write("\n" + "".join(f"{line}\n" for line in _notes(answers, self._out)), ranks)

    def _draw(
        self, answers: Sequence[Answer], texts: Sequence[WrappedText], width: int, ranks: Ranks
    ) -> None:
        """Draw the rows that may still change, and leave those alone that both answers have finished."""
        columns = [text.lines for text in texts]
        last = max(map(len, columns))
        up = f"\x1b[{self._drawn - 1}A" if self._drawn > 1 else ""
        rows = [
            self._row([("", column[row] if row < len(column) else "") for column in columns], width)
            for row in range(self._first, last)
        ]
        self._write(f"{up}\r" + "\n".join(f"{row}\x1b[K" for row in rows), ranks)
        pairs = zip(answers, columns, strict=True)
        finished = min((len(column) - 1 for one, column in pairs if one.end is None), default=last - 1)
        self._drawn = last - max(finished, self._first)
        self._first = max(finished, self._first)

    def _row(self, cells: Sequence[tuple[str, str]], width: int) -> str:
        """Return a row of (style or "", text), each as wide as its column."""
        padded = [
            (styled(text, style, self._out) if style else text) + " " * (width - width_of(text))
            for style, text in cells
        ]
        return BORDER.join(padded).rstrip()

    def _write(self, text: str, ranks: Ranks) -> None:
        if ranks.is_first:
            self._out.write(text)
            self._out.flush()


def _notes(answers: Sequence[Answer], out: TextIO) -> list[str]:
    """Return a line for each answer that was cut off, and for a terminal one with the speed."""
    lines = []
    for one in answers:
        if one.note():
            lines.append(styled(f"[{one.writer.role}: {one.note()}]", "note", out))
    if out.isatty() and any(one.num_tokens > 1 and one.end != INTERRUPTED for one in answers):
        speeds = [
            f"{one.writer.role} {one.num_tokens} tokens, {one.num_tokens / max(one.seconds, 1e-9):.0f}/s"
            for one in answers
        ]
        lines.append(styled(f"[{'; '.join(speeds)}]", "note", out))
    return lines
