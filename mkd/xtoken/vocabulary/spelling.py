"""How each tokenizer spells the other's tokens, and which tokens go on after a given beginning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from mkd.tokenizers.tokenizer import Tokenizer

NO_TOKENS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Pieces:
    """A list of token sequences: sequence i is ids[offsets[i] : offsets[i + 1]]."""

    ids: np.ndarray  # [n] int64
    offsets: np.ndarray  # [sequences + 1] int64

    @staticmethod
    def of(sequences: Sequence[Sequence[int]]) -> Pieces:
        lengths = [len(sequence) for sequence in sequences]
        ids = np.fromiter(chain.from_iterable(sequences), np.int64, sum(lengths))
        return Pieces(ids, np.cumsum([0, *lengths], dtype=np.int64))

    @property
    def lengths(self) -> np.ndarray:
        """[sequences] int64"""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[int, ...]:
        return tuple(self.ids[self.offsets[index] : self.offsets[index + 1]].tolist())


def spell_all(tokenizer: Tokenizer, fragments: Sequence[bytes | None]) -> Pieces:
    """How `tokenizer` writes each fragment in the middle of a text; an empty sequence for None and for what it cannot write."""
    return Pieces.of([(tokenizer.spell(fragment) or ()) if fragment else () for fragment in fragments])


def distinct_tokens(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Bytes -> the one token that stands for them, over all tokens that have bytes.

    Where several ids have the same bytes (the byte token <0x41> beside the piece "A") it is the one that the tokenizer
    itself writes, else the first.
    """
    found: dict[bytes, int] = {}
    for token_id, own in enumerate(tokenizer.token_bytes):
        if own and (own not in found or tokenizer.spell(own) == (token_id,)):
            found[own] = token_id
    return found


@dataclass(frozen=True)
class Continuations:
    """Tokens of one vocabulary by all but the last of the tokens that spell them in the other one.

    Plain arrays, so that it is cheap to send to a data worker; the dictionary is made where it is used.
    """

    prefixes: Pieces  # [p], distinct, none empty
    offsets: np.ndarray  # [p + 1] int64: prefix i has the entries [offsets[i], offsets[i + 1])
    tokens: np.ndarray  # [n] int64, a token whose spelling starts with the prefix ...
    lasts: np.ndarray  # [n] int64, ... and ends with this one token

    @staticmethod
    def of(spelled: Pieces, tokens: np.ndarray) -> Continuations:
        """Of those `tokens` (int64) that `spelled`, which is over the whole vocabulary, writes as two tokens or more."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for token in tokens[spelled.lengths[tokens] > 1].tolist():
            groups.setdefault(spelled[token][:-1], []).append(token)
        members = Pieces.of(list(groups.values()))
        lasts = spelled.ids[spelled.offsets[members.ids + 1] - 1]
        return Continuations(Pieces.of(list(groups)), members.offsets, members.ids, lasts)

    def after(self, prefix: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, their last tokens in the other vocabulary) int64; no id comes twice in either."""
        found = self._index.get(prefix)
        if found is None:
            return NO_TOKENS, NO_TOKENS
        part = slice(self.offsets[found], self.offsets[found + 1])
        return self.tokens[part], self.lasts[part]

    @cached_property
    def _index(self) -> dict[tuple[int, ...], int]:
        ids, bounds = self.prefixes.ids.tolist(), self.prefixes.offsets.tolist()
        return {tuple(ids[bounds[i] : bounds[i + 1]]): i for i in range(len(self.prefixes))}

    def __reduce__(self):
        return Continuations, (self.prefixes, self.offsets, self.tokens, self.lasts)  # without the dictionary


@dataclass(frozen=True)
class Spellings:
    """The candidates of an aligned chunk that has several tokens on one side."""

    students: Continuations  # student tokens, spelled by the teacher
    teachers: Continuations  # teacher tokens, spelled by the student

    @staticmethod
    def build(student: Tokenizer, teacher: Tokenizer, by_teacher: Pieces, by_student: Pieces) -> Spellings:
        """From the student's tokens as the teacher writes them and the teacher's tokens as the student writes them.

        Of ids with the same bytes only one is a candidate: no token then comes twice among the candidates of a chunk.
        """
        students, teachers = (
            np.array(sorted(distinct_tokens(t).values()), np.int64) for t in (student, teacher)
        )
        return Spellings(Continuations.of(by_teacher, students), Continuations.of(by_student, teachers))

    def one_to_many(self, prefix: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """(student ids, last teacher ids): student tokens that the teacher writes as `prefix` (not empty) and one more."""
        return self.students.after(prefix)

    def many_to_one(self, prefix: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """(last student ids, teacher ids): teacher tokens that the student writes as `prefix` (not empty) and one more."""
        teachers, lasts = self.teachers.after(prefix)
        return lasts, teachers
