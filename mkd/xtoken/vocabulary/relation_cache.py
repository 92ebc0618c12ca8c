"""Vocabulary relations on disk: one .npz file for each pair of tokenizers and each setting."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np

from mkd.errors import UsageError
from mkd.tokenizers.load import open_tokenizer
from mkd.tokenizers.tokenizer import Tokenizer
from mkd.xtoken.align.align_text import TokenizerSource
from mkd.xtoken.vocabulary.relation import ProjectionSettings, VocabularyRelation, build_relation
from mkd.xtoken.vocabulary.sparse import SparseMatrix
from mkd.xtoken.vocabulary.spelling import Continuations, Pieces, Spellings

FORMAT = 3
PAIRS = ("common_student", "common_teacher", "relaxed_student", "relaxed_teacher")
BEGINNINGS = ("student_beginnings", "teacher_beginnings")
MATRIX, SIDES = ("offsets", "columns", "values"), ("students", "teachers")
CONTINUATIONS = ("offsets", "tokens", "lasts")
META = "meta"


def build_projection(
    student: TokenizerSource,
    teacher: TokenizerSource,
    *,
    cache_dir: str | Path | None = None,
    settings: ProjectionSettings | None = None,
    projection: str | Path | None = None,
) -> VocabularyRelation:
    """Return the relation of two vocabularies, from `cache_dir` if it is there; else build and store it.

    `projection` names a file with the matrix to use instead: one that `mkd projection` wrote, or the
    published dense form (see load_published). Several processes may call this at once; they write the same
    file. Raises UsageError for tokenizers that share no token or lose bytes, and for a file that is damaged
    or made for other tokenizers.
    """
    student, teacher = open_tokenizer(student), open_tokenizer(teacher)
    settings = settings or ProjectionSettings()
    if projection is not None:
        return _from_file(student, teacher, Path(projection), cache_dir, settings)
    if cache_dir is None:
        return build_relation(student, teacher, settings)
    path = Path(cache_dir) / f"{_key(student, teacher, settings)}.npz"
    if not path.exists():
        save_relation(path, build_relation(student, teacher, settings), student, teacher, settings)
    return load_relation(path, student, teacher)


def save_relation(
    path: Path,
    relation: VocabularyRelation,
    student: Tokenizer,
    teacher: Tokenizer,
    settings: ProjectionSettings,
) -> None:
    """Write the relation; the file appears complete or not at all."""
    meta = {**_identity(student, teacher), "stages": settings.stages, "top_k": settings.top_k}
    arrays = {name: getattr(relation, name) for name in PAIRS + BEGINNINGS}
    arrays |= {name: getattr(relation.projection, name) for name in MATRIX}
    for side in SIDES:
        found = getattr(relation.spellings, side)
        arrays |= {f"{side}_prefix_ids": found.prefixes.ids, f"{side}_prefix_offsets": found.prefixes.offsets}
        arrays |= {f"{side}_{name}": getattr(found, name) for name in CONTINUATIONS}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            np.savez(file, **{META: np.array(json.dumps(meta))}, **arrays)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_relation(path: Path, student: Tokenizer, teacher: Tokenizer) -> VocabularyRelation:
    """Read a relation. Raises UsageError for a damaged file, and for one made for other tokenizers."""
    arrays = _read(path, student, teacher, whole=True)
    try:
        relation = _assemble(arrays, student.vocab_size, teacher.vocab_size)
    except KeyError as error:
        raise _refused(path, f"it holds no {error}") from error
    problem = _problem(relation)
    if problem:
        raise _refused(path, problem)
    return relation


def _read(path: Path, student: Tokenizer, teacher: Tokenizer, whole: bool) -> dict[str, np.ndarray]:
    """Return the arrays of a relation if `whole`; else read and check its description alone."""
    try:
        with np.load(path, allow_pickle=False) as file:
            meta = json.loads(str(file[META]))
            arrays = {name: file[name] for name in file.files if name != META} if whole else {}
    except Exception as error:  # numpy and zipfile raise a dozen different errors for a damaged file
        raise _refused(path, f"it cannot be read: {type(error).__name__}: {error}") from error
    for name, expected in _identity(student, teacher).items():
        if meta.get(name) != expected:
            what, found = name.replace("_", " "), meta.get(name)
            raise _refused(path, f"its {what} is {found}, and this run's is {expected}")
    return arrays


def check_projection(path: Path, student: Tokenizer, teacher: Tokenizer) -> None:
    """Raise UsageError if the file of a projection is missing, or if mkd made it for other tokenizers.

    No array is read: `build_projection` finds damaged ones.
    """
    if not path.is_file():
        raise UsageError(
            f"projection {path} is not a file",
            do="give the path of a projection matrix, or drop the setting: mkd then builds it",
            code="path-not-found",
        )
    if _is_ours(path):
        _read(path, student, teacher, whole=False)


def _from_file(
    student: Tokenizer,
    teacher: Tokenizer,
    path: Path,
    cache_dir: str | Path | None,
    settings: ProjectionSettings,
) -> VocabularyRelation:
    check_projection(path, student, teacher)
    if _is_ours(path):
        return load_relation(path, student, teacher)
    from mkd.xtoken.published.projections import load_published

    matrix = load_published(path, student.vocab_size, teacher.vocab_size)
    return build_projection(student, teacher, cache_dir=cache_dir, settings=settings).with_projection(matrix)


def _is_ours(path: Path) -> bool:
    """Return True if mkd wrote the .npz file; the published form has no description."""
    if path.suffix != ".npz":
        return False
    try:
        with np.load(path, allow_pickle=False) as file:
            return META in file.files
    except Exception:  # damaged: `load_relation` reports it
        return True


def _identity(student: Tokenizer, teacher: Tokenizer) -> dict[str, int | str]:
    return {
        "format": FORMAT,
        "student_size": student.vocab_size,
        "teacher_size": teacher.vocab_size,
        "student_fingerprint": student.fingerprint,
        "teacher_fingerprint": teacher.fingerprint,
    }


def _key(student: Tokenizer, teacher: Tokenizer, settings: ProjectionSettings) -> str:
    parts = [_identity(student, teacher), settings.stages, settings.top_k]
    return "projection-" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _assemble(arrays: dict[str, np.ndarray], student_size: int, teacher_size: int) -> VocabularyRelation:
    projection = SparseMatrix(*(arrays[name] for name in MATRIX), teacher_size)
    sides = []
    for side in SIDES:
        prefixes = Pieces(arrays[f"{side}_prefix_ids"], arrays[f"{side}_prefix_offsets"])
        sides.append(Continuations(prefixes, *(arrays[f"{side}_{name}"] for name in CONTINUATIONS)))
    pairs, starts = ([arrays[name] for name in names] for names in (PAIRS, BEGINNINGS))
    return VocabularyRelation(student_size, teacher_size, *pairs, projection, Spellings(*sides), *starts)


def _problem(relation: VocabularyRelation) -> str | None:
    """Return the error in the sizes of a relation that was read, or None."""
    matrix, sizes = relation.projection, (relation.student_size, relation.teacher_size)
    if matrix.shape != sizes:
        return f"its matrix has {matrix.shape[0]} rows, and the student's tokenizer {sizes[0]} ids"
    if not matrix.offsets[-1] == len(matrix.columns) == len(matrix.values):
        return f"its rows end at entry {matrix.offsets[-1]}, and it holds {len(matrix.columns)} columns"
    starts = relation.student_beginnings, relation.teacher_beginnings
    if tuple(map(len, starts)) != sizes:
        return f"it names the beginnings of {len(starts[0])} and {len(starts[1])} tokens"
    ours = [relation.common_student, *(array[array >= 0] for array in starts)]
    ids = [(array, sizes[0]) for array in ours]
    ids += [(array, sizes[1]) for array in (relation.common_teacher, matrix.columns)]
    if any(len(array) and not 0 <= array.min() <= array.max() < size for array, size in ids):
        return f"it names ids beyond the {sizes[0]} of the student and the {sizes[1]} of the teacher"
    return None


def _refused(path: Path, why: str) -> UsageError:
    return UsageError(
        f"projection {path} does not fit this run",
        why,
        "remove the file, so that mkd builds it again, or use the tokenizers that it was built from",
        code="projection-does-not-fit",
    )
