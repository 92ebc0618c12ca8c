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
    chunks: np.ndarray  # [c, 4] int64: student start, end, teacher start, end (ends exclusive)


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
            f"alignment mode {mode} is not known", do=f"use one of {', '.join(MODES)}", code="value-unknown"
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
    groups = [token_groups(encoded) for encoded in (student, teacher)]
    borders = [np.append(starts[:1], ends) for _, starts, ends in groups]
    _, *found = np.intersect1d(*borders, assume_unique=True, return_indices=True)
    rows, columns = (tokens[places] for (tokens, _, _), places in zip(groups, found, strict=True))
    return np.stack([rows[:-1], rows[1:], columns[:-1], columns[1:]], axis=1)


def _with_roles(
    student: Tokenizer, ours: EncodedText, teacher: Tokenizer, theirs: EncodedText, chunks: np.ndarray
) -> np.ndarray:
    """Add a chunk for BOS at the start, and one for EOS at the end, if both tokenizers have added it."""
    for role, position in (("bos", 0), ("eos", -1)):
        sides = ((student, ours), (teacher, theirs))
        if all(_has_role(tokenizer, encoded, role, position) for tokenizer, encoded in sides):
            i, j = position % len(ours), position % len(theirs)
            pair = np.array([[i, i + 1, j, j + 1]])
            chunks = np.concatenate([pair, chunks] if position == 0 else [chunks, pair])
    return chunks


def _has_role(tokenizer: Tokenizer, encoded: EncodedText, role: str, position: int) -> bool:
    if not len(encoded) or encoded.ends[position] != -1:
        return False
    return encoded.ids[position] == tokenizer.roles.get(role)
