"""Random chunks of two small made-up vocabularies, and the chunk loss on them.

The loss is computed by ranks, and by the dense reference.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.distributed as dist

from mkd.losses import HeadInput
from mkd.platform import detect
from mkd.xtoken.chunks import ChunkBatch, ChunkSide
from mkd.xtoken.fused import ChunkOutput, fused_chunk_kd
from mkd.xtoken.vocabulary.chunk_vocabulary import ChunkVocabulary
from mkd.xtoken.vocabulary.relation import VocabularyRelation
from mkd.xtoken.vocabulary.slots import TeacherSlots
from mkd.xtoken.vocabulary.sparse import SparseMatrix
from mkd.xtoken.vocabulary.spelling import Continuations, Pieces, Spellings
from tests.losses.objectives import chunk_settings_of
from tests.xtoken.chunk_reference import DenseRelation, dense_chunk_kd

STUDENT_SIZE, TEACHER_SIZE = 6, 5  # of hidden states
SHAPES = {0: (1, 1), 1: (1, 3), 2: (3, 1), 3: (2, 3)}  # tokens of a chunk of each kind


@dataclass(frozen=True)
class Case:
    """Everything on one process: real rows of the heads in the order of ids.

    The student's padding rows come after them.
    """

    student_hidden: torch.Tensor
    student_weight: torch.Tensor  # [padded, h_s]
    teacher_hidden: torch.Tensor
    teacher_weight: torch.Tensor  # [rows, h_t]
    chunks: ChunkBatch
    relation: VocabularyRelation
    student_rows: int

    def to(self, dtype: torch.dtype) -> Case:
        return Case(
            *(
                t.to(dtype) if isinstance(t, torch.Tensor) else t
                for t in (getattr(self, field.name) for field in fields(self))
            )
        )


def relation_of(
    student: int, teacher: int, common: int, seed: int = 0, whole_projection: bool = False
) -> VocabularyRelation:
    """Return a relation of vocabularies of these sizes.

    It has random common pairs, two relaxed ones and a random projection.
    """
    generator = np.random.default_rng(seed)
    more = 2 if min(student, teacher) >= common + 2 else 0
    students, teachers = (generator.permutation(size)[: common + more] for size in (student, teacher))
    order = np.argsort(students[:common])
    rows = generator.integers(0, student, 4 * student)
    rows = np.concatenate([rows, np.arange(student)]) if whole_projection else rows[rows % 5 != 0]
    columns = generator.integers(0, teacher, len(rows))
    projection = SparseMatrix.from_entries(
        rows, columns, generator.random(len(rows)) + 0.1, (student, teacher)
    ).normalised()
    nothing = Continuations(
        Pieces.from_sequences([]), np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
    )
    pairs = students[:common][order], teachers[:common][order], students[common:], teachers[common:]
    starts = [generator.choice([-1, *pairs[0]], size) for size in (student, teacher)]
    for own, ids in zip(starts, pairs, strict=False):
        own[ids] = pairs[0]
    return VocabularyRelation(student, teacher, *pairs, projection, Spellings(nothing, nothing), *starts)


def chunk_batch(
    relation: VocabularyRelation, counts: tuple[int, ...], seed: int
) -> tuple[ChunkBatch, int, int]:
    """Return (`counts[kind]` random chunks of each kind, rows of the student, rows of the teacher).

    Some chunks have weight 0.
    """
    generator = np.random.default_rng(seed)
    kinds = np.repeat(np.arange(4), counts)
    sizes = [np.array([SHAPES[kind][side] for kind in kinds], np.int64).reshape(-1) for side in (0, 1)]
    vocabularies = relation.student_size, relation.teacher_size
    labels = [generator.integers(0, v, n.sum()) for v, n in zip(vocabularies, sizes, strict=True)]
    for i in range(0, int((kinds == 0).sum()), 2):  # every second 1-1 chunk is of a common pair
        pair = generator.integers(len(relation.common_student))
        labels[0][i], labels[1][i] = relation.common_student[pair], relation.common_teacher[pair]
    offsets = [np.concatenate([[0], np.cumsum(n)]) for n in sizes]
    totals = [int(n.sum()) + 3 for n in sizes]
    sides = [
        ChunkSide(
            *(torch.from_numpy(a) for a in (generator.permutation(rows)[: len(label)], label, offset)), offset
        )
        for rows, label, offset in zip(totals, labels, offsets, strict=True)
    ]
    supports = [support(i, kind, labels, offsets, vocabularies, generator) for i, kind in enumerate(kinds)]
    found = [np.concatenate([np.zeros(0, np.int64), *(s[k] for s in supports)]) for k in (0, 1)]
    lengths = np.array([len(s[0]) for s in supports], np.int64)
    weights = generator.random(len(kinds)).astype(np.float32)
    weights[generator.random(len(kinds)) < 0.25] = 0.0
    batch = ChunkBatch(
        *sides,
        kinds.astype(np.int8),
        torch.from_numpy(weights),
        torch.zeros(len(kinds), dtype=torch.int64),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        torch.from_numpy(np.repeat(np.arange(len(kinds)), lengths)),
        *(torch.from_numpy(ids) for ids in found),
        len(kinds),
    )
    return batch, *totals


def support(i, kind, labels, offsets, vocabularies, generator) -> list[np.ndarray]:
    """Return the realised pair of last tokens and some others."""
    if kind == 0:
        return [np.zeros(0, np.int64)] * 2
    last = [label[offset[i + 1] - 1] for label, offset in zip(labels, offsets, strict=True)]
    count = 0 if kind == 3 else generator.integers(0, 5)
    return [
        np.concatenate([[one], np.setdiff1d(generator.permutation(v)[: 2 * count], [one])[:count]]).astype(
            np.int64
        )
        if count
        else np.array([one])
        for one, v in zip(last, vocabularies, strict=True)
    ]


def random_case(
    counts: tuple[int, ...] = (7, 4, 4, 3),
    sizes=(37, 48, 45),
    relation: VocabularyRelation | None = None,
    seed: int = 0,
) -> Case:
    """Return a case; `sizes` are rows of the student's head, with padding, and rows of the teacher's.

    The tokenizers have fewer ids by default.
    """
    student_rows, padded, teacher_rows = sizes
    relation = relation or relation_of(student_rows - 2, teacher_rows - 3, 20, seed)
    batch, student_total, teacher_total = chunk_batch(relation, counts, seed)
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (student_total, STUDENT_SIZE),
        (padded, STUDENT_SIZE),
        (teacher_total, TEACHER_SIZE),
        (teacher_rows, TEACHER_SIZE),
    )
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    tensors[1][student_rows:] = 50.0  # a mistaken read shows
    return Case(*tensors, batch, relation, student_rows)


def expected(case: Case, **settings) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return values and gradients of (hidden, weight), float64."""
    settings = chunk_settings_of(**settings)
    hidden, weight = (t.double().requires_grad_() for t in (case.student_hidden, case.student_weight))
    students, teachers = len(weight[: case.student_rows]), len(case.teacher_weight)
    pairs = [
        np.stack(case.relation.pairs(relaxed), axis=1).tolist()
        for relaxed in (False, settings.loss == "h_kl")
    ]
    pairs = [[(s, t) for s, t in some if s < students and t < teachers] for some in pairs]
    matrix = torch.zeros(students, teachers, dtype=torch.float64)
    sparse = case.relation.projection
    matrix[torch.from_numpy(sparse.rows), torch.from_numpy(sparse.columns)] = torch.from_numpy(
        sparse.values
    ).double()
    starts = case.relation.student_beginnings[:students], case.relation.teacher_beginnings[:teachers]
    beginnings = tuple(torch.full((n,), -1, dtype=torch.int64) for n in (students, teachers))
    for own, known in zip(beginnings, starts, strict=True):
        own[: len(known)] = torch.from_numpy(known)
    student_logits = hidden @ weight[:students].T
    teacher_logits = case.teacher_hidden.double() @ case.teacher_weight.double().T
    values = dense_chunk_kd(
        student_logits, teacher_logits, case.chunks, DenseRelation(*pairs, matrix, beginnings), settings
    )
    if values["loss"].requires_grad:
        values["loss"].backward()
    zeros = (torch.zeros_like(t) if t.grad is None else t.grad for t in (hidden, weight))
    return {name: value.detach() for name, value in values.items()}, *zeros


def on_rank(
    case: Case,
    settings: dict,
    sequence_parallel: bool = False,
    announced: bool = True,
    chunk_rows: int | None = 5,
):
    """Return one rank's values, and the gradients (times 3) of its hidden states and its rows of the head."""
    detect()  # Megatron's mappings of sequence parallelism name CUDA
    rank, size = dist.get_rank(), dist.get_world_size()
    hidden, teacher_hidden = case.student_hidden, case.teacher_hidden
    if sequence_parallel:
        hidden, teacher_hidden = (padded_part(t, rank, size) for t in (hidden, teacher_hidden))
    hidden, weight = (t.clone().requires_grad_() for t in (hidden, case.student_weight.chunk(size)[rank]))
    vocabulary, teacher_weight = vocabulary_of(case, settings, rank, size)
    factor = torch.tensor(3.0, dtype=hidden.dtype)
    output = fused_chunk_kd(
        HeadInput(hidden, weight),
        HeadInput(teacher_hidden, teacher_weight),
        case.chunks,
        vocabulary=vocabulary,
        cp_group=None,
        settings=chunk_settings_of(**settings),
        tp_group=dist.group.WORLD,
        sequence_parallel=sequence_parallel,
        loss_gradient=factor if announced else None,
        chunk_rows=chunk_rows,
    )
    (factor * output.loss).backward()
    return values(output), hidden.grad, weight.grad


def each_on_rank(cases: list[tuple]) -> list:
    """Return `on_rank` of several argument tuples."""
    return [on_rank(*one) for one in cases]


def assert_all_equal_reference(ranks, tp: int, cases: list[tuple[Case, dict]], tolerance: float) -> None:
    """Check all cases in one visit to the ranks."""
    by_rank = ranks.run(each_on_rank, tp, cases)
    for (case, settings), results in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert_equals_reference(results, case, settings, tolerance)


def padded_part(hidden: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(hidden, (0, 0, 0, -len(hidden) % size)).chunk(size)[rank]


def vocabulary_of(case: Case, settings: dict, rank: int, size: int) -> tuple[ChunkVocabulary, torch.Tensor]:
    """Return (the vocabulary, the teacher's rows of this rank).

    Empty slots, which nothing may read, are NaN.
    """
    slots = TeacherSlots.from_relation(
        case.relation, len(case.student_weight), len(case.teacher_weight), size
    )
    loss = settings.get("loss", "partition_kl")
    vocabulary = ChunkVocabulary.from_slots(
        slots, case.student_rows, rank, relation=case.relation, loss=loss, relaxed=loss == "h_kl"
    )
    ids = torch.from_numpy(slots.teacher_ids[rank])
    return vocabulary, case.teacher_weight[ids.clamp(min=0)].masked_fill((ids < 0)[:, None], float("nan"))


def values(output: ChunkOutput) -> dict[str, torch.Tensor]:
    return {field.name: getattr(output, field.name).detach() for field in fields(output)}


def assert_equals_reference(
    results, case: Case, settings: dict, tolerance: float, sequence_parallel: bool = False
) -> None:
    """Compare every rank's values, the same bits on all, and the gathered gradients with the reference."""
    wanted, wanted_hidden, wanted_weight = expected(case, **settings)
    for got, _, _ in results:
        for name, value in wanted.items():
            assert torch.equal(got[name], results[0][0][name]), name
            torch.testing.assert_close(got[name].double(), value.double(), rtol=tolerance, atol=tolerance)
    hiddens = (
        [torch.cat([r[1] for r in results])[: len(wanted_hidden)]]
        if sequence_parallel
        else [r[1] for r in results]
    )
    for hidden in hiddens:
        assert_near(hidden, 3.0 * wanted_hidden, tolerance)
    assert_near(torch.cat([r[2] for r in results]), 3.0 * wanted_weight, tolerance)


def assert_near(actual: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    """Check the largest error relative to the largest number."""
    size = float(wanted.abs().max()) if wanted.numel() else 0.0
    error = float((actual.double() - wanted).abs().max()) if wanted.numel() else 0.0
    assert error <= tolerance * size, f"error {error:.2e} at size {size:.2e}"
