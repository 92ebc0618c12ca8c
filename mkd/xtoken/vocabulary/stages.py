"""The stages of the projection matrix (student vocabulary x teacher vocabulary), each a separate matrix.

The stages and weights are those of the tool chain published with P-KL (X-Token, arXiv 2605.21699): exact map,
multi-token map with its reverse pass, special tokens, sort and cut, the exact map applied again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mkd.xtoken.vocabulary.sparse import SparseMatrix
from mkd.xtoken.vocabulary.spelling import Pieces

MAX_PIECES = 4
PIECE_WEIGHTS = 0.9 * 0.1 ** np.arange(MAX_PIECES)
"""Weight of the i-th piece before normalisation.

Nearly all weight is on the first piece, the one that the model has to predict.
"""

ENDS = ("eos", "end_of_turn")
ROLES = (*ENDS, "bos", "unk", "pad")
"""Roles by rank: a token with several roles is paired by the first of them."""


def exact_map(
    student_bytes: Sequence[bytes | None],  # [student vocabulary]
    teacher_tokens: Mapping[bytes, int],  # bytes -> the teacher token that spells them
    teacher_size: int,
) -> SparseMatrix:
    """Return weight 1 for every student token and teacher token with the same bytes."""
    rows = [i for i, piece in enumerate(student_bytes) if piece in teacher_tokens]
    columns = [teacher_tokens[student_bytes[i]] for i in rows]
    return SparseMatrix.from_entries(rows, columns, np.ones(len(rows)), (len(student_bytes), teacher_size))


def multi_token_map(by_teacher: Pieces, by_student: Pieces) -> SparseMatrix:
    """Relate each student token to the teacher's pieces of it, and to the teacher tokens it is in.

    The second relation is the reverse pass. The arguments are the student's tokens as the teacher writes
    them, and the teacher's tokens as the student writes them. The first MAX_PIECES pieces count, with
    PIECE_WEIGHTS normalised over them; both directions are added.
    """
    shape = len(by_teacher), len(by_student)
    students, pieces, weights = _weighted_pieces(by_teacher)
    forward = SparseMatrix.from_entries(students, pieces, weights, shape)
    teachers, pieces, weights = _weighted_pieces(by_student)
    return forward.plus(SparseMatrix.from_entries(pieces, teachers, weights, shape))


def special_map(
    student_roles: Mapping[str, int], teacher_roles: Mapping[str, int], shape: tuple[int, int]
) -> SparseMatrix:
    """Relate each student token with a role to the teacher's token of that role, with weight 1.

    Tokens are related by role, never by text. A student token that ends both documents and turns is related
    to both of the teacher's, with equal weights.
    """
    pairs: dict[int, list[int]] = {}
    for role in ROLES:
        if role in student_roles and role in teacher_roles:
            teachers = pairs.setdefault(student_roles[role], [])
            if not teachers or (role in ENDS and teacher_roles[role] not in teachers):
                teachers.append(teacher_roles[role])
    rows = [student for student, teachers in pairs.items() for _ in teachers]
    columns = [teacher for teachers in pairs.values() for teacher in teachers]
    weights = np.array([1 / len(pairs[student]) for student in rows])
    return SparseMatrix.from_entries(rows, columns, weights, shape)


def role_pairs(student_roles: Mapping[str, int], teacher_roles: Mapping[str, int]) -> dict[int, int]:
    """Return student id -> teacher id of the same role, one-to-one; a token that has a pair keeps it."""
    pairs: dict[int, int] = {}
    for role in ROLES:
        if role in student_roles and role in teacher_roles:
            student, teacher = student_roles[role], teacher_roles[role]
            if student not in pairs and teacher not in pairs.values():
                pairs[student] = teacher
    return pairs


def _weighted_pieces(spelled: Pieces) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (token, piece, weight) of each token's first MAX_PIECES pieces; its weights sum to 1."""
    tokens = np.repeat(np.arange(len(spelled)), spelled.lengths)
    places = np.arange(len(spelled.ids)) - spelled.offsets[tokens]
    used = places < MAX_PIECES
    tokens, places = tokens[used], places[used]
    sums = np.cumsum(PIECE_WEIGHTS)[np.minimum(spelled.lengths[tokens], MAX_PIECES) - 1]
    return tokens, spelled.ids[used], PIECE_WEIGHTS[places] / sums
