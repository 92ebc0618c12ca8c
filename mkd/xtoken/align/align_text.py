"""Where two tokenizations of one text meet: chunks of student tokens and teacher tokens that stand for the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from mkd.errors import UsageError
from mkd.tokenizers.load import open_tokenizer
from mkd.tokenizers.spans import EncodedText, token_groups
from mkd.tokenizers.tokenizer import Tokenizer
from mkd.xtoken.published.align_dp import align_dp

TokenizerSource = Tokenizer | PreTrainedTokenizerBase | str | Path  # as `open_tokenizer` takes them


@dataclass(frozen=True)
class AlignedText:
    """One text as the student's and as the teacher's tokens, and the chunks in which they agree.

    Chunks ascend on both sides and are disjoint. Tokens may be in no chunk: BOS of one side, what follows the last place
    where both tokenizations have a boundary.
    """

    student_ids: np.ndarray  # [n] int64
    teacher_ids: np.ndarray  # [m] int64
    chunks: (
        np.ndarray
    )  # [c, 4] int64: student start, student end, teacher start, teacher end; ends are exclusive


def align(
    student: TokenizerSource, teacher: TokenizerSource, text: str, *, mode: str = "byte_offset"
) -> AlignedText:
    """Encode `text` with both tokenizers and align the tokens.

    Modes: `byte_offset` cuts wherever both sides have a token boundary (exact, milliseconds); `dp` is the dynamic
    programme of published systems over token texts (see `align_dp`). BOS and EOS that both tokenizers add themselves are
    chunks of their own, paired by role. Raises DataError for a text that has no UTF-8 form, UsageError for a tokenizer
    that cannot be loaded or aligned, or an unknown mode.
    """
    core = aligner(mode, text)
    student, teacher = open_tokenizer(student), open_tokenizer(teacher)
    ours, theirs = student.encode_spans(text), teacher.encode_spans(text)
    return AlignedText(ours.ids, theirs.ids, _with_roles(student, ours, teacher, theirs, core(ours, theirs)))


def aligner(mode: str, text: str) -> Callable[[EncodedText, EncodedText], np.ndarray]:
    """The function (student, teacher) -> chunks of a mode, for tokens of `text`. Raises UsageError for an unknown mode."""
    modes = {
        "byte_offset": align_spans,
        "dp": lambda student, teacher: align_dp(student, teacher, text.encode()),
    }
    if mode not in modes:
        raise UsageError(
            f"alignment mode {mode} is not known",
            do=f"use one of {', '.join(modes)}",
            code="alignment-mode-unknown",
        )
    return modes[mode]


def align_spans(student: EncodedText, teacher: EncodedText) -> np.ndarray:
    """Chunks [c, 4] int64 between every two neighbouring byte positions where tokens end on both sides. O(n + m).

    The first chunk starts where both sides start, else at the first common end. Tokens of one span are in one chunk, and
    tokens that stand for no text are in none.
    """
    (ours, student_starts, student_ends), (theirs, teacher_starts, teacher_ends) = map(
        token_groups, (student, teacher)
    )
    _, rows, columns = np.intersect1d(
        np.append(student_starts[:1], student_ends),
        np.append(teacher_starts[:1], teacher_ends),
        assume_unique=True,
        return_indices=True,
    )
    rows, columns = ours[rows], theirs[columns]
    return np.stack([rows[:-1], rows[1:], columns[:-1], columns[1:]], axis=1)


def _with_roles(
    student: Tokenizer, ours: EncodedText, teacher: Tokenizer, theirs: EncodedText, chunks: np.ndarray
):
    """The chunks with a pair for BOS at the start and one for EOS at the end, where both tokenizers have added it."""
    begin, end = [], []
    for role, position, pairs in (("bos", 0, begin), ("eos", -1, end)):
        sides = ((student, ours), (teacher, theirs))
        if all(_has_role(tokenizer, encoded, role, position) for tokenizer, encoded in sides):
            i, j = position % len(ours), position % len(theirs)
            pairs.append([i, i + 1, j, j + 1])
    parts = [np.array(pairs, dtype=np.int64).reshape(-1, 4) for pairs in (begin, end)]
    return np.concatenate([parts[0], chunks, parts[1]])


def _has_role(tokenizer: Tokenizer, encoded: EncodedText, role: str, position: int) -> bool:
    return (
        len(encoded) > 0
        and encoded.ends[position] == -1
        and encoded.ids[position] == tokenizer.roles.get(role)
    )
