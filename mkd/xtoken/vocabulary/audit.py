"""Shares of a real text that two tokenizers can be compared on, by kind of chunk and class of character."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mkd.tokenizers.tokenizer import Tokenizer
from mkd.xtoken.align.align_text import align_spans
from mkd.xtoken.vocabulary.relation import VocabularyRelation

KINDS = ("1-1 common", "1-1 not common", "1-N", "M-1", "M-N", "dropped")
COMMON, NOT_COMMON, ONE_TO_MANY, MANY_TO_ONE, MANY_TO_MANY, DROPPED = range(len(KINDS))

CLASSES = ("letters", "digits", "punctuation", "CJK", "whitespace", "other", "special")
LETTERS, DIGITS, PUNCTUATION, CJK, WHITESPACE, OTHER, SPECIAL = range(len(CLASSES))
CJK_NAMES = ("CJK ", "HIRAGANA ", "KATAKANA ", "HANGUL ", "IDEOGRAPHIC ", "FULLWIDTH ", "HALFWIDTH ")


@dataclass(frozen=True)
class Audit:
    """Counts over a sample of text. A token has the class of its first character that is not white space.

    Special: tokens without text (BOS). Dropped: tokens in no chunk, and bytes that no chunk covers.
    """

    num_bytes: np.ndarray  # [classes, kinds] int64, bytes of the text
    student_tokens: np.ndarray  # [classes, kinds] int64
    teacher_tokens: np.ndarray  # [kinds] int64
    num_texts: int

    def shares(self) -> dict:
        """Return the shares, ready for JSON.

        {"bytes", "student_tokens", "teacher_tokens": {kind: share}, "classes": {class: {kind: share}}, and
        the totals}. Each table sums to 1; the tables of the classes are shares of the student's tokens of
        that class.
        """
        classes = {name: row for name, row in zip(CLASSES, self.student_tokens, strict=True) if row.any()}
        return {
            "num_texts": self.num_texts,
            "num_bytes": int(self.num_bytes.sum()),
            "num_student_tokens": int(self.student_tokens.sum()),
            "num_teacher_tokens": int(self.teacher_tokens.sum()),
            "bytes": _shares(self.num_bytes.sum(0)),
            "student_tokens": _shares(self.student_tokens.sum(0)),
            "teacher_tokens": _shares(self.teacher_tokens),
            "classes": {name: _shares(row) for name, row in classes.items()},
            "bytes_of_class": _shares(self.num_bytes.sum(1), CLASSES),
        }

    def table(self) -> str:
        """Return the shares as lines of text."""
        shares = self.shares()
        rows = [("all bytes", shares["bytes"]), ("student tokens", shares["student_tokens"])]
        rows += [("teacher tokens", shares["teacher_tokens"])]
        rows += [(f"  {name}", row) for name, row in shares["classes"].items()]
        sizes = f"{shares['num_texts']} texts, {shares['num_bytes']} bytes"
        ours, theirs = shares["num_student_tokens"], shares["num_teacher_tokens"]
        tokens = f"{ours} student tokens, {theirs} teacher tokens"
        lines = [f"{sizes}, {tokens}; shares by kind of chunk, classes over student tokens:"]
        lines += [f"{'':16}" + "".join(f"{kind:>16}" for kind in KINDS)]
        lines += [f"{name:16}" + "".join(f"{row[kind]:16.4f}" for kind in KINDS) for name, row in rows]
        return "\n".join(lines)


def audit(
    student: Tokenizer, teacher: Tokenizer, relation: VocabularyRelation, texts: Iterable[str]
) -> Audit:
    """Align every text and count tokens and bytes. An empty sample gives zeros."""
    twins = relation.twins()
    num_bytes = np.zeros((len(CLASSES), len(KINDS)), np.int64)
    student_tokens, teacher_tokens = np.zeros_like(num_bytes), np.zeros(len(KINDS), np.int64)
    num_texts = 0
    for text in texts:
        ours, theirs = student.encode_spans(text), teacher.encode_spans(text)
        chunks = align_spans(ours, theirs)
        kinds = _chunk_kinds(chunks, twins, ours.ids, theirs.ids)
        byte_classes = _byte_classes(text)
        covered = _mark(len(byte_classes), ours.starts[chunks[:, 0]], ours.ends[chunks[:, 1] - 1], kinds)
        np.add.at(num_bytes, (byte_classes, covered), 1)
        token_kinds = _mark(len(ours.ids), chunks[:, 0], chunks[:, 1], kinds)
        np.add.at(student_tokens, (_token_classes(byte_classes, ours.starts, ours.ends), token_kinds), 1)
        token_kinds = _mark(len(theirs.ids), chunks[:, 2], chunks[:, 3], kinds)
        teacher_tokens += np.bincount(token_kinds, minlength=len(KINDS))
        num_texts += 1
    return Audit(num_bytes, student_tokens, teacher_tokens, num_texts)


def _chunk_kinds(
    chunks: np.ndarray, twins: np.ndarray, student_ids: np.ndarray, teacher_ids: np.ndarray
) -> np.ndarray:
    """Return the index into KINDS of each chunk, int64 [c]."""
    one_student = chunks[:, 1] - chunks[:, 0] == 1
    one_teacher = chunks[:, 3] - chunks[:, 2] == 1
    common = twins[student_ids[chunks[:, 0]]] == teacher_ids[chunks[:, 2]]
    cases = [one_student & one_teacher & common, one_student & one_teacher, one_student, one_teacher]
    return np.select(cases, [COMMON, NOT_COMMON, ONE_TO_MANY, MANY_TO_ONE], MANY_TO_MANY)


def _mark(size: int, starts: np.ndarray, ends: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return [size] int64: value i in [starts[i], ends[i]), which are disjoint, DROPPED elsewhere."""
    marked = np.full(size, DROPPED, np.int64)
    lengths = ends - starts
    places = np.arange(lengths.sum()) + np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
    marked[places] = np.repeat(values, lengths)
    return marked


def _byte_classes(text: str) -> np.ndarray:
    """Return the class of the character that each byte of the text is part of, int64 [bytes]."""
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    distinct, place = np.unique(points, return_inverse=True)
    characters = [chr(point) for point in distinct.tolist()]
    classes = np.array([_class_of(character) for character in characters], np.int64)
    widths = np.array([len(character.encode()) for character in characters], np.int64)
    return np.repeat(classes[place], widths[place])


def _token_classes(byte_classes: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the class of each token, int64 [n]."""
    visible = np.append(np.flatnonzero(byte_classes != WHITESPACE), len(byte_classes))
    first = visible[np.searchsorted(visible[:-1], starts)]
    padded = np.append(byte_classes, WHITESPACE)
    return np.where(starts == ends, SPECIAL, np.where(first < ends, padded[first], WHITESPACE))


def _class_of(character: str) -> int:
    category = unicodedata.category(character)
    if character.isspace():
        return WHITESPACE
    if unicodedata.name(character, "").startswith(CJK_NAMES):
        return CJK
    if category[0] in "LM":
        return LETTERS
    if category[0] == "N":
        return DIGITS
    return PUNCTUATION if character.isascii() and character.isprintable() or category[0] == "P" else OTHER


def _shares(counts: np.ndarray, names: tuple[str, ...] = KINDS) -> dict[str, float]:
    total = max(int(counts.sum()), 1)
    return {name: int(count) / total for name, count in zip(names, counts, strict=True)}
