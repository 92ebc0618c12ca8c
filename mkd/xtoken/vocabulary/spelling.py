"""Spell each tokenizer's tokens in the other's: candidates of chunks, and the first common token of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from mkd.tokenizers.tokenizer import Tokenizer

NO_TOKENS = np.zeros(0, np.int64)
NONE = -1


@dataclass(frozen=True)
class Pieces:
    """A list of token sequences: sequence i is ids[offsets[i] : offsets[i + 1]]."""

    ids: np.ndarray  # [n] int64
    offsets: np.ndarray  # [sequences + 1] int64

    @staticmethod
    def from_sequences(sequences: Sequence[Sequence[int]]) -> Pieces:
        """Concatenate the sequences."""
        lengths = [len(sequence) for sequence in sequences]
        ids = np.fromiter(chain.from_iterable(sequences), np.int64, sum(lengths))
        return Pieces(ids, np.cumsum([0, *lengths], dtype=np.int64))

    @property
    def lengths(self) -> np.ndarray:
        """Length of each sequence, int64 [sequences]."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[int, ...]:
        return tuple(self.ids[self.offsets[index] : self.offsets[index + 1]].tolist())


def spell_all(tokenizer: Tokenizer, fragments: Sequence[bytes | None]) -> Pieces:
    """Spell each fragment as in the middle of a text; empty for None and what `tokenizer` cannot write."""
    return Pieces.from_sequences([fragment and tokenizer.spell(fragment) or () for fragment in fragments])


def distinct_tokens(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Return bytes -> the one token that spells them, over all tokens that have bytes.

    Several ids may have the same bytes, such as the byte token <0x41> and the piece "A". Then it is the one
    that the tokenizer itself writes, else the first.
    """
    found: dict[bytes, int] = {}
    for token_id, piece in enumerate(tokenizer.token_bytes):
        if piece and (piece not in found or tokenizer.spell(piece) == (token_id,)):
            found[piece] = token_id
    return found


@dataclass(frozen=True)
class Continuations:
    """Tokens of one vocabulary, grouped by how the other vocabulary spells them.

    A group shares all but the last of the other vocabulary's tokens. Plain arrays are cheap to send to a data
    worker; the dictionary is built on first use.
    """

    prefixes: Pieces  # [p], distinct, none empty
    offsets: np.ndarray  # [p + 1] int64: prefix i has the entries [offsets[i], offsets[i + 1])
    tokens: np.ndarray  # [n] int64, a token whose spelling starts with the prefix ...
    lasts: np.ndarray  # [n] int64, ... and ends with this one token

    @staticmethod
    def from_spelled(spelled: Pieces, tokens: np.ndarray) -> Continuations:
        """Group those `tokens` (int64) that the other vocabulary writes as two tokens or more.

        `spelled` has the spellings of the whole vocabulary.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for token in tokens[spelled.lengths[tokens] > 1].tolist():
            groups.setdefault(spelled[token][:-1], []).append(token)
        members = Pieces.from_sequences(list(groups.values()))
        lasts = spelled.ids[spelled.offsets[members.ids + 1] - 1]
        return Continuations(Pieces.from_sequences(list(groups)), members.offsets, members.ids, lasts)

    def after(self, prefix: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens, their last tokens in the other vocabulary) int64; no id comes twice in either."""
        found = self._index.get(prefix)
        if found is None:
            return NO_TOKENS, NO_TOKENS
        part = slice(self.offsets[found], self.offsets[found + 1])
        return self.tokens[part], self.lasts[part]

    @cached_property
    def _index(self) -> dict[tuple[int, ...], int]:
        ids, bounds = self.prefixes.ids.tolist(), self.prefixes.offsets.tolist()
        return {tuple(ids[bounds[i] : bounds[i + 1]]): i for i in range(len(self.prefixes))}

    def __reduce__(self) -> tuple[Any, ...]:
        return Continuations, (self.prefixes, self.offsets, self.tokens, self.lasts)  # without the dictionary


@dataclass(frozen=True)
class Spellings:
    """The candidates of an aligned chunk that has several tokens on one side."""

    students: Continuations  # student tokens, spelled by the teacher
    teachers: Continuations  # teacher tokens, spelled by the student

    @staticmethod
    def from_tokenizers(
        student: Tokenizer, teacher: Tokenizer, by_teacher: Pieces, by_student: Pieces
    ) -> Spellings:
        """Build the candidates from the spellings of each vocabulary in the other one.

        Of ids with the same bytes only one is a candidate, so that no token comes twice among the candidates
        of a chunk.
        """

        def candidates(own: Tokenizer, spelled: Pieces) -> Continuations:
            tokens = np.array(sorted(distinct_tokens(own).values()), np.int64)
            return Continuations.from_spelled(spelled, tokens)

        return Spellings(candidates(student, by_teacher), candidates(teacher, by_student))

    def one_to_many(self, prefix: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return (student ids, last teacher ids): the teacher writes each as `prefix` and that last id."""
        return self.students.after(prefix)

    def many_to_one(self, prefix: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return (last student ids, teacher ids): the student writes each as `prefix` and that last id."""
        teachers, lasts = self.teachers.after(prefix)
        return lasts, teachers


def build_beginnings(
    common_student: np.ndarray,  # [k] int64
    common_teacher: np.ndarray,  # [k] int64, their twins
    by_teacher: Pieces,  # the student's tokens as the teacher writes them
    by_student: Pieces,  # the teacher's tokens as the student writes them
) -> tuple[np.ndarray, np.ndarray]:
    """Return ([student_size], [teacher_size]) int64: the common token that each id begins with, or -1.

    Common tokens are given by their student id. A common token begins with itself. Any other token begins
    with what the first token of its spelling in the other vocabulary begins with.
    """
    students, teachers = np.full(len(by_teacher), NONE), np.full(len(by_student), NONE)
    students[common_student], teachers[common_teacher] = common_student, common_student
    unknown = len(students) + len(teachers) + 1
    while (left := np.count_nonzero(students == NONE) + np.count_nonzero(teachers == NONE)) < unknown:
        unknown = left
        _look_up(students, by_teacher, teachers)
        _look_up(teachers, by_student, students)
    return students, teachers


def _look_up(classes: np.ndarray, spelled: Pieces, of_other: np.ndarray) -> None:
    """Give each id without a class the class of its first piece, if that has one."""
    ids = np.flatnonzero((classes == NONE) & (spelled.lengths > 0))
    classes[ids] = of_other[spelled.ids[spelled.offsets[ids]]]
