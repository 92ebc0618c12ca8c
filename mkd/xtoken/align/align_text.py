"""Alignment of two tokenizations of one text: chunks of student and teacher tokens for the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from mkd.errors import UsageError
from mkd.tokenizers.load import open_tokenizer
from mkd.tokenizers.spans import EncodedText, token_groups
from mkd.tokenizers.tokenizer import Tokenizer

MODES = ("byte_offset", "dp")
TokenizerSource = Tokenizer | PreTrainedTokenizerBase | str | Path  # as `open_tokenizer` takes them


@dataclass(frozen=True)
class AlignedText:
    """One text in the student's and in the teacher's tokens, and the chunks in which they agree.

    Chunks ascend on both sides and are disjoint. A token may be in no chunk: the BOS of one side, or a token
    after the last common boundary.
    """

    student_ids: np.ndarray  # [n] int64
    teacher_ids: np.ndarray  # [m] int64
    # [c, 4] int64: student start, student end, teacher start, teacher end (ends exclusive)
    chunks: np.ndarray


def align(
    student: TokenizerSource, teacher: TokenizerSource, text: str, *, mode: str = "byte_offset"
) -> AlignedText:
    """Encode `text` with both tokenizers and align the tokens.

    Modes: `byte_offset` cuts wherever both sides have a token boundary (exact, milliseconds); `dp` is the
    dynamic programme of published systems over token texts (see `align_dp`). If both tokenizers add BOS, or
    both add EOS, the two tokens form a separate chunk. Raises DataError for a text without a UTF-8 form,
    UsageError for a tokenizer that cannot be loaded or aligned, and for an unknown mode.
    """
    core = aligner(mode, text)
    student, teacher = open_tokenizer(student), open_tokenizer(teacher)
    ours, theirs = student.encode_spans(text), teacher.encode_spans(text)
    return AlignedText(ours.ids, theirs.ids, _with_roles(student, ours, teacher, theirs, core(ours, theirs)))


def aligner(mode: str, text: str) -> Callable[[EncodedText, EncodedText], np.ndarray]:
    """Return a mode's function (student, teacher) -> chunks of `text`. Raises UsageError for other modes."""
    if mode not in MODES:
        raise UsageError(
            f"alignment mode {mode} is not known",
            do=f"use one of {', '.join(MODES)}",
            code="alignment-mode-unknown",
        )
    if mode == "byte_offset":
        return align_spans
    from mkd.xtoken.published.align_dp import align_dp

    return partial(align_dp, data=text.encode())


def align_spans(student: EncodedText, teacher: EncodedText) -> np.ndarray:
    """Return the chunks [c, 4] int64 between consecutive byte positions where tokens end on both sides.

    The work is O(n + m). The first chunk starts at the start of the text if both sides start there, else at
    the first common end. Tokens that share a span are in one chunk; tokens without text are in none.
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
    """Add a chunk for BOS at the start, and one for EOS at the end, if both tokenizers have added it."""
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
