"""Ids without their text in the tokens of a teacher: tokenised documents, and completions as sampled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mkd.data.aligned.context_records import ContextTemplate
from mkd.data.images.conversation import ConversationImages
from mkd.tokenizers.spans import EncodedText
from mkd.tokenizers.tokenizer import Tokenizer
from mkd.xtoken.align.align_text import AlignedText, aligner

SHARED_ROLES = ("bos", "eos", "end_of_turn", "unk", "pad")  # a token with several roles counts as the first


@dataclass(frozen=True)
class Pair:
    """A student's and a teacher's tokenizer and how their tokens are aligned. Picklable, for workers."""

    student: Tokenizer
    teacher: Tokenizer
    alignment: str
    reasoning: bool
    append_eod: bool
    student_images: ConversationImages | None = None  # None: the model reads no images
    teacher_images: ConversationImages | None = None
    context: ContextTemplate | None = None  # of the teacher's prompt; None: it reads the student's


def align_ids(ids: np.ndarray, pair: Pair, completion: int = 0) -> AlignedText:
    """Return a tokenised document and the teacher's tokens of its text.

    The text is cut at token `completion`, the border between prompt and completion. A token that is not text
    becomes the teacher's token of the same role, if it has one. Tokens with invalid UTF-8, and other tokens
    that are not text, are in no chunk; the teacher reads only the text around them.
    """
    return _align_runs(ids, pair, completion, starts_document=True)


def align_sampled(ids: np.ndarray, pair: Pair, *, is_stopped: bool, is_chat: bool) -> AlignedText:
    """Return a sampled completion and the teacher's tokens of it, both without the prompt before them.

    As `align_ids`, except for the end. If the completion `is_stopped`, its last token becomes the teacher's
    token that ends a turn (`is_chat`) or a text. A completion that was cut off continues, and the teacher
    might write its end with other tokens: its last chunk is left out, and so is half a character.
    """
    aligned = _align_runs(ids[:-1] if is_stopped else ids, pair, 0, starts_document=False)
    if not is_stopped:
        return AlignedText(ids, aligned.teacher_ids, aligned.chunks[:-1])
    twin = _stop_twin(int(ids[-1]), pair, is_chat)
    if twin is None:
        return AlignedText(ids, aligned.teacher_ids, aligned.chunks)
    n, m = len(ids) - 1, len(aligned.teacher_ids)
    chunks = np.concatenate([aligned.chunks, [[n, n + 1, m, m + 1]]])
    return AlignedText(ids, np.append(aligned.teacher_ids, twin), chunks)


def _stop_twin(stop: int, pair: Pair, is_chat: bool) -> int | None:
    """Return the teacher's token with the role of the stop token; None if it has none that ends a text."""
    ours, theirs = pair.student.roles, pair.teacher.roles
    roles = [
        role for role in (("end_of_turn", "eos") if is_chat else ("eos", "end_of_turn")) if role in theirs
    ]
    same = [role for role in roles if ours.get(role) == stop]
    return next((theirs[role] for role in (*same, *roles)), None)


def _align_runs(ids: np.ndarray, pair: Pair, cut: int, starts_document: bool) -> AlignedText:
    roles, token_bytes = _shared_roles(pair), pair.student.token_bytes
    known = len(token_bytes)  # an embedding may have more rows
    contents: list[Any] = [token_bytes[i] if i < known else None for i in ids.tolist()]
    teacher_parts, chunk_parts, num_teacher = [], [], 0
    for first, last in _runs(contents, cut):
        if contents[first] is None:
            teacher_ids, chunks = _align_roles(ids[first:last].tolist(), roles)
        else:
            is_first = starts_document and not num_teacher
            teacher_ids, chunks = _align_run(contents[first:last], pair, starts_document=is_first)
        teacher_parts.append(teacher_ids)
        chunk_parts.append(chunks + [first, first, num_teacher, num_teacher])
        num_teacher += len(teacher_ids)
    none = np.zeros(0, dtype=np.int64)
    return AlignedText(
        ids, np.concatenate([none, *teacher_parts]), np.concatenate([none.reshape(0, 4), *chunk_parts])
    )


def _shared_roles(pair: Pair) -> Mapping[int, int]:
    """Return student id -> teacher id of the tokens with the same role."""
    ours, theirs = pair.student.roles, pair.teacher.roles
    return {ours[role]: theirs[role] for role in reversed(SHARED_ROLES) if role in ours and role in theirs}


def _runs(contents: list[Any], cut: int) -> Iterator[tuple[int, int]]:
    """Yield [first, last) of the longest runs of tokens that all are text (valid UTF-8) or all are not.

    Tokens with invalid UTF-8 are skipped. No run crosses the start of the token `cut`.
    """
    borders = [
        i for i in range(1, len(contents)) if i == cut or (contents[i] is None) != (contents[i - 1] is None)
    ]
    for first, last in zip([0, *borders], [*borders, len(contents)], strict=True):
        if first < last and contents[first] is None:
            yield first, last
        else:
            yield from _valid_runs(contents[first:last], first)


def _valid_runs(contents: list[bytes], first: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a run between tokens with invalid UTF-8, each valid by itself."""
    while contents:
        try:
            b"".join(contents).decode("utf-8")
        except UnicodeDecodeError as error:
            ends = np.cumsum([len(content) for content in contents])
            begin, end = np.searchsorted(ends, [error.start, error.end - 1], side="right").tolist()
            yield from _valid_runs(contents[:begin], first)
            contents, first = contents[end + 1 :], first + end + 1
        else:
            yield first, first + len(contents)
            return


def _align_roles(ids: list[int], roles: Mapping[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return (teacher ids, chunks) of tokens that are not text."""
    places = np.array([place for place, token in enumerate(ids) if token in roles], dtype=np.int64)
    twins = np.array([roles[ids[place]] for place in places], dtype=np.int64)
    ranges = np.arange(len(twins))
    return twins, np.stack([places, places + 1, ranges, ranges + 1], axis=1)


def _align_run(contents: list[bytes], pair: Pair, starts_document: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return (teacher ids, chunks) of a run of text; the teacher adds BOS only at a document's start."""
    text = b"".join(contents).decode("utf-8")
    ends = np.cumsum([len(content) for content in contents])
    student = EncodedText(np.zeros(len(ends), dtype=np.int64), np.append(0, ends[:-1]), ends)
    teacher = pair.teacher.encode_spans(text, continuation=not starts_document)
    while len(teacher) and teacher.ends[-1] < 0:  # an EOS that the tokenizer added: the text may continue
        teacher = EncodedText(teacher.ids[:-1], teacher.starts[:-1], teacher.ends[:-1])
    return teacher.ids, aligner(pair.alignment, text)(student, teacher)
