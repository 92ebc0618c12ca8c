"""An alignment as text for people: the tokens of both sides, chunk by chunk."""

from __future__ import annotations

from collections import Counter

import numpy as np

from mkd.human import counted
from mkd.tokenizers.tokenizer import Tokenizer
from mkd.xtoken.align.align_text import AlignedText

COLOURS = ("\033[36m", "\033[33m")
RESET = "\033[0m"


def view_alignment(aligned: AlignedText, student: Tokenizer, teacher: Tokenizer, *, colour: bool) -> str:
    """Return three lines: counts by kind of chunk, the student's tokens, the teacher's tokens.

    Chunks are separated by bars, in alternating colours if `colour`; the tokens of a chunk are joined by `+`.
    Tokens in no chunk are in parentheses. Invalid UTF-8 and control characters are escaped.
    """
    sizes = aligned.chunks[:, [1, 3]] - aligned.chunks[:, [0, 2]]
    kinds = Counter(
        f"{'1' if one == 1 else 'M'}-{'1' if other == 1 else 'N'}" for one, other in sizes.tolist()
    )
    counts = ", ".join(f"{kind} {kinds[kind]}" for kind in ("1-1", "1-N", "M-1", "M-N"))
    header = (
        f"{counted(len(aligned.student_ids), 'student token')}, "
        f"{counted(len(aligned.teacher_ids), 'teacher token')}, "
        f"{counted(len(aligned.chunks), 'chunk')} ({counts})"
    )
    ours = _line(student, aligned.student_ids, aligned.chunks[:, :2], colour)
    theirs = _line(teacher, aligned.teacher_ids, aligned.chunks[:, 2:], colour)
    return f"{header}\nstudent {ours}\nteacher {theirs}"


def _line(tokenizer: Tokenizer, ids: np.ndarray, ranges: np.ndarray, colour: bool) -> str:
    tokens = [_shown(tokenizer, i) for i in ids.tolist()]
    parts, done = [], 0
    for number, (start, end) in enumerate(ranges.tolist()):
        parts += [f"({token})" for token in tokens[done:start]]
        chunk = "+".join(tokens[start:end])
        parts.append(f"{COLOURS[number % 2]}{chunk}{RESET}" if colour else chunk)
        done = end
    return f"|{'|'.join([*parts, *(f'({token})' for token in tokens[done:])])}|"


def _shown(tokenizer: Tokenizer, token: int) -> str:
    piece = tokenizer.token_bytes[token]
    if piece is None:
        return tokenizer.decode([token])
    # An invalid byte becomes a surrogate.
    return "".join(map(_escaped, piece.decode("utf-8", "surrogateescape")))


def _escaped(character: str) -> str:
    return f"\\x{ord(character) - 0xDC00:02x}" if "\udc80" <= character <= "\udcff" else repr(character)[1:-1]
