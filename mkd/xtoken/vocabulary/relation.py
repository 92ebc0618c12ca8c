"""The relation of two vocabularies: common tokens, relaxed pairs, and a sparse projection."""

from __future__ import annotations

import contextlib
import unicodedata
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mkd.errors import UsageError
from mkd.tokenizers.tokenizer import Tokenizer
from mkd.xtoken.vocabulary.sparse import SparseMatrix
from mkd.xtoken.vocabulary.spelling import Pieces, Spellings, build_beginnings, distinct_tokens, spell_all
from mkd.xtoken.vocabulary.stages import exact_map, multi_token_map, role_pairs, special_map

STAGES = ("exact", "multi", "special", "cut")


@dataclass(frozen=True)
class ProjectionSettings:
    """The stages of a projection matrix: see mkd/xtoken/vocabulary/stages.py."""

    stages: tuple[str, ...] = STAGES
    top_k: int = 4  # entries of a row that stage "cut" keeps

    def __post_init__(self) -> None:
        if not self.stages or set(self.stages) - set(STAGES) or set(self.stages) == {"cut"}:
            what = f"--stages {','.join(self.stages)} makes no projection matrix"
            why = f"the stages are {', '.join(STAGES)}, and the last one only cuts what the others made"
            do = f"use for example --stages {','.join(STAGES)}"
            raise UsageError(what, why, do, code="value-not-valid")
        if self.top_k < 1:
            what, do = (
                f"--top-k {self.top_k} leaves no entry in a row",
                "use 1 or more; the published runs use 4",
            )
            raise UsageError(what, do=do, code="out-of-range")


@dataclass(frozen=True)
class VocabularyRelation:
    """Relation of the vocabularies of a student and a teacher. Sizes and ids are those of the tokenizers.

    Common tokens have the same bytes on both sides, or the same role (EOS, end of turn, BOS, UNK, PAD). If
    the vocabularies are the same, every id is common with itself. Pairs are one-to-one.
    """

    student_size: int
    teacher_size: int
    common_student: np.ndarray  # [k] int64, ascending
    common_teacher: np.ndarray  # [k] int64, distinct
    relaxed_student: np.ndarray  # [l] int64, ascending: pairs of tokens without a common twin that differ ...
    relaxed_teacher: np.ndarray  # [l] int64 ... only in Unicode form, leading space or case
    projection: SparseMatrix  # [student_size, teacher_size]; rows without support: `projection.empty_rows`
    spellings: Spellings
    student_beginnings: np.ndarray  # [student_size] int64: student id of its first common token, or -1
    teacher_beginnings: np.ndarray  # [teacher_size] int64, likewise

    def pairs(self, relaxed: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return (student ids ascending, teacher ids) int64 of common tokens, with `relaxed` also others."""
        if not relaxed:
            return self.common_student, self.common_teacher
        students = np.concatenate([self.common_student, self.relaxed_student])
        teachers = np.concatenate([self.common_teacher, self.relaxed_teacher])
        order = np.argsort(students)
        return students[order], teachers[order]

    def twins(self) -> np.ndarray:
        """Return the teacher id of each common token, -1 for the others, int64 [student_size]."""
        twins = np.full(self.student_size, -1)
        twins[self.common_student] = self.common_teacher
        return twins

    def with_projection(self, projection: SparseMatrix) -> VocabularyRelation:
        """Return the same relation with another matrix of the same shape."""
        assert projection.shape == (self.student_size, self.teacher_size)
        return replace(self, projection=projection)


def build_relation(
    student: Tokenizer, teacher: Tokenizer, settings: ProjectionSettings | None = None
) -> VocabularyRelation:
    """Build the relation, in seconds for vocabularies of 150,000 tokens.

    Raises UsageError if the vocabularies share no token, and for a tokenizer whose tokens have no known
    bytes.
    """
    settings = settings or ProjectionSettings()
    by_teacher, by_student = spell_all(teacher, student.token_bytes), spell_all(student, teacher.token_bytes)
    spellings = Spellings.from_tokenizers(student, teacher, by_teacher, by_student)
    if student.vocabulary_difference(teacher) is None:  # ids mean the same, whatever their bytes and roles
        common = {i: i for i in set(student.vocabulary.values()) & set(teacher.vocabulary.values())}
        projection = _matrix_of(common, student, teacher)
    else:
        common = _common(student, teacher)
        projection = _projection(settings, student, teacher, by_teacher, by_student)
    loose = relaxed_pairs(_unpaired(student, common.keys()), _unpaired(teacher, set(common.values())))
    sizes = student.vocab_size, teacher.vocab_size
    pairs = _as_arrays(common)
    starts = build_beginnings(*pairs, by_teacher, by_student)
    return VocabularyRelation(*sizes, *pairs, *_as_arrays(loose), projection, spellings, *starts)


def _common(student: Tokenizer, teacher: Tokenizer) -> dict[int, int]:
    """Return student id -> teacher id of the same role or bytes, one-to-one; roles are paired first."""
    ours, theirs = distinct_tokens(student), distinct_tokens(teacher)
    if ours.keys().isdisjoint(theirs):
        sizes = len(ours), len(theirs)
        raise UsageError(
            f"the tokenizers have no token in common: no two of {sizes[0]} and {sizes[1]} are the same bytes",
            "probabilities cannot be compared: more likely a wrong path or a damaged file than a real pair",
            "check the tokenizers of student and teacher",
            code="tokenizers-differ",
        )
    by_role = role_pairs(student.roles, teacher.roles)
    by_bytes = {ours[piece]: theirs[piece] for piece in ours if piece in theirs}
    with_role = set(by_role.values())
    return by_role | {s: t for s, t in by_bytes.items() if s not in by_role and t not in with_role}


def _projection(
    settings: ProjectionSettings,
    student: Tokenizer,
    teacher: Tokenizer,
    by_teacher: Pieces,
    by_student: Pieces,
) -> SparseMatrix:
    """Return the chosen stages' matrix; exact map and special tokens come last, so their rows stay pure."""
    projection = _matrix_of({}, student, teacher)
    if "multi" in settings.stages:
        projection = multi_token_map(by_teacher, by_student)
    if "cut" in settings.stages:
        projection = projection.top_k(settings.top_k)
    projection = projection.normalised()
    if "exact" in settings.stages:
        exact = exact_map(student.token_bytes, distinct_tokens(teacher), teacher.vocab_size)
        projection = projection.with_rows_of(exact)
    if "special" in settings.stages:
        projection = projection.with_rows_of(special_map(student.roles, teacher.roles, projection.shape))
    return projection


def _matrix_of(pairs: Mapping[int, int], student: Tokenizer, teacher: Tokenizer) -> SparseMatrix:
    """Return a matrix with weight 1 for each pair."""
    shape = student.vocab_size, teacher.vocab_size
    return SparseMatrix.from_entries(list(pairs), list(pairs.values()), np.ones(len(pairs)), shape)


def _forms(text: str) -> tuple[str, str, str]:
    """Return the text without allowed differences of a pair: Unicode form; leading spaces; case."""
    normal = unicodedata.normalize("NFKC", text)
    unspaced = normal.lstrip(" ")
    return normal, unspaced, unspaced.casefold()


def relaxed_pairs(student: Mapping[bytes, int], teacher: Mapping[bytes, int]) -> dict[int, int]:
    """Return student id -> teacher id of tokens that differ only in Unicode form, leading spaces or case.

    This is the relaxed map of GOLD and H-KL; the Unicode form is NFKC. The arguments are the tokens without a
    common twin; pairs are one-to-one. Closer variants pair first, then smaller ids, which most vocabularies
    give to frequent tokens. Tokens that are not valid UTF-8, or only spaces, stay unpaired.
    """
    pairs: dict[int, int] = {}
    ours, theirs = _all_forms(student), _all_forms(teacher)
    for i in range(3):  # closest pairs first
        taken, waiting = set(pairs.values()), {}
        for token in sorted(theirs.keys() - taken, reverse=True):  # so that pop() gives the smallest id
            waiting.setdefault(theirs[token][i], []).append(token)
        for token in sorted(ours.keys() - pairs.keys()):
            if candidates := waiting.get(ours[token][i]):
                pairs[token] = candidates.pop()
    return pairs


def _all_forms(tokens: Mapping[bytes, int]) -> dict[int, tuple[str, str, str]]:
    found = {}
    for piece, token in tokens.items():
        with contextlib.suppress(UnicodeDecodeError):
            found[token] = _forms(piece.decode("utf-8"))
    return {token: forms for token, forms in found.items() if forms[-1]}


def _unpaired(tokenizer: Tokenizer, paired: Container[int]) -> dict[bytes, int]:
    return {piece: i for piece, i in distinct_tokens(tokenizer).items() if i not in paired}


def _as_arrays(pairs: Mapping[int, int]) -> tuple[np.ndarray, np.ndarray]:
    ordered = np.array(sorted(pairs.items()), np.int64).reshape(-1, 2)
    return ordered[:, 0].copy(), ordered[:, 1].copy()
