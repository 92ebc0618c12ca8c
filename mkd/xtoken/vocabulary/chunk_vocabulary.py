"""Both models' vocabularies as one tensor-parallel rank's columns, on its device, for the chunk losses."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mkd.errors import UsageError
from mkd.parallel.tensor_records import map_tensors
from mkd.xtoken.vocabulary.relation import VocabularyRelation
from mkd.xtoken.vocabulary.slots import EMPTY, TeacherSlots


@dataclass(frozen=True)
class ClassMap:
    """A map from one model's w columns on this rank to the classes of all ranks.

    Each rank has k classes, numbered `rank * k + class`.
    """

    forward: Tensor  # sparse CSR [tp * k, w] fp32: masses of classes = sum over ranks of forward @ p
    backward: Tensor  # sparse CSR [w, tp * k], its transpose
    lost: Tensor  # [w] fp32, 1 - sum of the column, 0 to 1: the share of each column that has no class


@dataclass(frozen=True)
class Projection:
    """Probabilities on common classes: the teacher's columns for `p_kl`, the student's for `prefix_kl`."""

    student: ClassMap
    teacher: ClassMap | None  # None: the teacher's columns are the classes
    supported: Tensor  # [k] bool, this rank's classes that some student token maps to
    student_rest: bool  # True if some real row of the student loses probability
    teacher_rest: bool  # True if some real row of the teacher has no supported class


@dataclass(frozen=True)
class ChunkVocabulary:
    """The columns of both models' ids.

    The columns of all ranks are numbered `rank * width + column`: the "place". A student id equals its place.
    "Real" columns are rows of the model; the others are padding or empty slots, and their logits are never
    read.
    """

    rank: int  # in the tensor-parallel group
    student_width: int  # w_s
    teacher_width: int  # w_t >= w_s
    num_common: int
    num_student_rows: int
    num_teacher_rows: int
    student_real: Tensor  # [tp, w_s] bool
    teacher_real: Tensor  # [tp, w_t] bool
    common: Tensor  # [tp, w_s] bool: column j of both models is a common pair
    teacher_places: Tensor  # [teacher_rows] int64, place of each teacher id
    paired_student: Tensor  # [k] int64 places of the hybrid losses' common tokens ...
    paired_teacher: Tensor  # [k] int64 ... and of their twins
    projection: Projection | None = None  # for p_kl and prefix_kl

    @staticmethod
    def from_slots(
        slots: TeacherSlots,
        student_vocab_size: int,  # real rows of the student's head; those beyond are padding
        rank: int,  # in the tensor-parallel group
        *,
        relation: VocabularyRelation | None = None,  # needed for p_kl, prefix_kl and relaxed pairs
        loss: str = "partition_kl",  # p_kl and prefix_kl get a projection
        relaxed: bool = False,  # True: the pairs include the relaxed ones
    ) -> ChunkVocabulary:
        """Return the vocabulary on the CPU; `.to(device)` moves it.

        Raises UsageError if no row of the heads is common.
        """
        tp, student_width = slots.common.shape
        student_real = (np.arange(tp * student_width) < student_vocab_size).reshape(tp, student_width)
        teacher_real = slots.teacher_ids != EMPTY
        num_common = int(slots.common.sum())
        if num_common == 0:
            raise UsageError(
                "student and teacher have no common token among the rows of their heads",
                "a chunk loss compares them on common tokens",
                "check the tokenizers and the vocabulary sizes of both models",
                code="tokenizers-differ",
            )
        assert not (slots.common & ~student_real).any(), "a padded row of the student is not a token"
        students, teachers = _pairs(slots, relation if relaxed else None, student_vocab_size)
        make_projection = {"p_kl": _on_teacher, "prefix_kl": _on_beginnings}.get(loss)
        projection = make_projection and make_projection(slots, relation, student_real, teacher_real, rank)
        sizes = student_width, teacher_real.shape[1], num_common, student_vocab_size, len(slots.columns)
        arrays = student_real, teacher_real, slots.common, slots.columns, students, teachers
        return ChunkVocabulary(rank, *sizes, *map(torch.from_numpy, arrays), projection)

    @property
    def both_have_rest(self) -> bool:
        """True if each model has a real row that is not common."""
        return min(self.num_student_rows, self.num_teacher_rows) > self.num_common

    def to(self, device: torch.device | str) -> ChunkVocabulary:
        """Return the vocabulary on a device."""
        return map_tensors(self, lambda tensor: tensor.to(device))


def _pairs(
    slots: TeacherSlots, relation: VocabularyRelation | None, student_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of the hybrid losses' pairs: common tokens, with a `relation` relaxed pairs too."""
    if relation is not None:
        students, teachers = relation.pairs(relaxed=True)
        exist = (students < student_rows) & (teachers < len(slots.columns))
        return students[exist], slots.columns[teachers[exist]]
    ranks, columns = np.nonzero(slots.common)
    return ranks * slots.common.shape[1] + columns, ranks * slots.teacher_ids.shape[1] + columns


def _on_teacher(
    slots: TeacherSlots, relation: VocabularyRelation, student_real, teacher_real, rank: int
) -> Projection:
    """Return the relation's matrix as a projection: classes are the teacher's columns."""
    matrix = relation.projection
    rows, teachers, values = matrix.rows, matrix.columns, matrix.values
    exist = (rows < student_real.sum()) & (teachers < len(slots.columns))
    rows, places, values = rows[exist], slots.columns[teachers[exist]], values[exist]
    supported = np.bincount(places, minlength=teacher_real.size) > 0
    student, student_rest = _class_map(rows, places, values, student_real, teacher_real.size, rank)
    teacher_rest = bool((teacher_real.reshape(-1) & ~supported).any())
    here = torch.from_numpy(supported.reshape(teacher_real.shape)[rank])
    return Projection(student, None, here, student_rest, teacher_rest)


def _on_beginnings(
    slots: TeacherSlots, relation: VocabularyRelation, student_real, teacher_real, rank: int
) -> Projection:
    """Project each token on the common token that it begins with; classes are the student's columns."""
    common = np.flatnonzero(slots.common)
    maps = []
    for classes, places, real in (
        (relation.student_beginnings, np.arange(student_real.sum()), student_real),
        (relation.teacher_beginnings, slots.columns, teacher_real),
    ):
        classes = classes[: len(places)]
        ids = np.flatnonzero(np.isin(classes, common))
        maps.append(_class_map(places[ids], classes[ids], np.ones(len(ids)), real, slots.common.size, rank))
    (student, student_rest), (teacher, teacher_rest) = maps
    return Projection(student, teacher, torch.from_numpy(slots.common[rank]), student_rest, teacher_rest)


def _class_map(
    places, classes, values, real: np.ndarray, num_classes: int, rank: int
) -> tuple[ClassMap, bool]:
    """Return (map of this rank's columns, True if a real column of any rank loses probability).

    Entries are (place, class, value) of all ranks; `real` is [tp, w] bool.
    """
    width = real.shape[1]
    kept = np.bincount(places, values.astype(np.float64), minlength=real.size)
    lost = np.where(real.reshape(-1), 1.0 - kept, 0.0)
    lost[lost < 1e-6] = 0.0  # columns that sum to 1 but for the rounding of fp32
    here = places // width == rank
    indices = torch.from_numpy(np.stack([classes[here], places[here] % width]))
    weights = torch.from_numpy(values[here].astype(np.float32))
    forward = _sparse_rows(indices, weights, (num_classes, width))
    backward = _sparse_rows(indices.flip(0), weights, (width, num_classes))
    lost_here = torch.from_numpy(lost.reshape(real.shape)[rank].astype(np.float32))
    return ClassMap(forward, backward, lost_here), bool((lost > 0).any())


def _sparse_rows(indices: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    """Return checked compressed sparse rows, without torch's warning that they are in beta.

    `to_sparse_csr` of torch 2.11 cannot be used: without entries its result has strides of 0 and fails the
    check.
    """
    with warnings.catch_warnings(), torch.sparse.check_sparse_tensor_invariants(True):
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        entries = torch.sparse_coo_tensor(indices, values, size).coalesce()
        rows, columns = (index.clone(memory_format=torch.contiguous_format) for index in entries.indices())
        starts = torch.searchsorted(rows, torch.arange(size[0] + 1))
        return torch.sparse_csr_tensor(starts, columns, entries.values(), size)
