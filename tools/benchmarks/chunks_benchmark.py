"""Benchmark the losses of cross-tokenizer teachers, LM heads included, beside the bare matrix products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from mkd.config.models import XTOKEN_LOSSES
from mkd.losses import HeadInput
from mkd.xtoken.chunks import MANY_TO_MANY, MANY_TO_ONE, ONE_TO_MANY, ONE_TO_ONE, ChunkBatch, ChunkSide
from mkd.xtoken.fused import fused_chunk_kd
from mkd.xtoken.loss_settings import ChunkLossSettings
from mkd.xtoken.vocabulary.chunk_vocabulary import ChunkVocabulary
from mkd.xtoken.vocabulary.relation import VocabularyRelation
from mkd.xtoken.vocabulary.slots import EMPTY, TeacherSlots
from mkd.xtoken.vocabulary.sparse import SparseMatrix
from mkd.xtoken.vocabulary.spelling import Continuations, Pieces, Spellings
from tools.benchmarks.benchmark_report import Report, table
from tools.benchmarks.gate import SAME_FUNCTION, Errors, relative
from tools.benchmarks.machine import Machine
from tools.benchmarks.measure import Arm, peak_bytes, time_arms

GEMMS = "bare GEMMs"
# The gradients of these losses are signs of sorted values. Rounding to bf16 flips them: the gate uses fp32.
SORTED = ("gold", "uld")
# Kind -> (fraction of the chunks, student tokens, teacher tokens), as measured on Python sources and
# documentation: SmolLM2 teaches a student with Mistral's tokenizer.
KINDS = {
    ONE_TO_ONE: (0.87, 1, 1),
    ONE_TO_MANY: (0.005, 1, 2),
    MANY_TO_ONE: (0.112, 2, 1),
    MANY_TO_MANY: (0.013, 3, 2),
}
SUPPORT = 8  # pairs of a chunk that is neither 1-1 nor M-N
COMMON = 2 / 3  # fraction of the smaller vocabulary that is common

Gradients = tuple[Tensor, Tensor, Tensor]
"""(mean loss [], d hidden [n, h_s], d weight [v_s, h_s])."""


@dataclass(frozen=True)
class ChunkShape:
    chunks: int
    student_hidden: int
    teacher_hidden: int
    student_vocab: int
    teacher_vocab: int

    def __str__(self) -> str:
        hidden = f"{self.student_hidden},{self.teacher_hidden}"
        return f"{self.chunks},{hidden},{self.student_vocab},{self.teacher_vocab}"


class ChunkCase:
    """Random hidden states, heads, vocabularies and chunks of one shape."""

    def __init__(self, shape: ChunkShape, machine: Machine):
        self.shape, self.machine = shape, machine
        generator, random = machine.generator(), np.random.default_rng(machine.seed)
        self.relation = _relation(shape, random)
        self.slots = TeacherSlots.from_relation(
            self.relation, shape.student_vocab, shape.teacher_vocab, tp_size=1
        )
        chunks = _chunks(shape, random)
        self.chunks = chunks.map(lambda tensor: tensor.to(machine.device))

        def normal(*size: int, std: float = 1.0) -> Tensor:
            return (
                torch.empty(*size, device=machine.device, dtype=machine.dtype)
                .normal_(generator=generator)
                .mul_(std)
            )

        self.student_hidden = normal(len(chunks.student.rows), shape.student_hidden)
        self.student_weight = normal(
            shape.student_vocab, shape.student_hidden, std=2 * shape.student_hidden**-0.5
        )
        self.teacher_hidden = normal(len(chunks.teacher.rows), shape.teacher_hidden)
        in_slots = torch.from_numpy(self.slots.teacher_ids[0]).to(machine.device)
        weight = normal(len(in_slots), shape.teacher_hidden, std=2 * shape.teacher_hidden**-0.5)
        self.teacher_weight = weight.masked_fill_((in_slots == EMPTY)[:, None], 0.0)

    def loss(self, name: str, dtype: torch.dtype) -> Callable[[], Gradients]:
        """Return a call that computes a loss's mean over the chunks, forward and backward."""
        settings = ChunkLossSettings(loss=name)
        made = ChunkVocabulary.from_slots(
            self.slots, self.shape.student_vocab, 0, relation=self.relation, loss=name
        )
        vocabulary, share = made.to(self.machine.device), 1.0 / self.shape.chunks
        tensors = [
            t.to(dtype)
            for t in (self.student_hidden, self.student_weight, self.teacher_hidden, self.teacher_weight)
        ]

        def run() -> Gradients:
            hidden, weight = tensors[0].detach().requires_grad_(), nn.Parameter(tensors[1])
            whole = dict(vocabulary=vocabulary, settings=settings, tp_group=None, cp_group=None)
            output = fused_chunk_kd(HeadInput(hidden, weight), HeadInput(*tensors[2:]), self.chunks, **whole)
            loss = output.loss * share
            return (loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))

        return run

    def gemms(self) -> Callable[[], None]:
        """Return a call of the four matrix products that every loss with LM heads needs."""
        gradient = torch.empty(
            len(self.student_hidden), self.shape.student_vocab, device=self.machine.device
        ).normal_()
        gradient = gradient.to(self.machine.dtype)

        def run() -> None:
            self.teacher_hidden @ self.teacher_weight.t()
            self.student_hidden @ self.student_weight.t()
            gradient @ self.student_weight
            gradient.t() @ self.student_hidden

        return run


def benchmark(machine: Machine, shape: ChunkShape, losses: tuple[str, ...] = XTOKEN_LOSSES) -> Report:
    """Check all losses against float64, measure their time and memory at one shape, and print the table."""
    case, errors, timed = ChunkCase(shape, machine), {}, []
    for name in losses:
        run = case.loss(name, machine.dtype)
        gated = case.loss(name, torch.float32) if name in SORTED else run
        errors[name] = _errors(gated(), case.loss(name, torch.float64)())
        timed += [Arm(name, run)] * errors[name].within(SAME_FUNCTION)
    times = time_arms([*timed, Arm(GEMMS, case.gemms())], machine.device, machine.rounds)
    rows = [[GEMMS, f"{times[GEMMS]:.3f}", "1.00", "", "", ""]]
    for name, error in errors.items():
        measured = ["wrong: not timed", "", ""]
        if name in times:
            measured = [f"{times[name]:.3f}", f"{times[name] / times[GEMMS]:.2f}", ""]
            if machine.is_cuda:
                peak = peak_bytes(next(arm for arm in timed if arm.name == name), machine.device)
                measured[-1] = f"{peak / 2**20:.0f}"
        rows.append([f"mkd {name}", *measured, f"{error.loss:.1e}", f"{error.gradient:.1e}"])
    header = ["forward + backward", "ms", "x GEMMs", "peak MiB", "loss err", "grad err"]
    print(table(f"chunks {shape} (chunks,h_s,h_t,V_s,V_t)", header, rows))
    wrong = [f"{name} at {shape}" for name in losses if name not in times]
    return Report([], wrong, {str(shape): times})


def _errors(result: Gradients, reference: Gradients) -> Errors:
    loss, *gradients = map(relative, result, reference)
    return Errors(loss, max(gradients))


def _relation(shape: ChunkShape, random: np.random.Generator) -> VocabularyRelation:
    """Return a relation of random pairs.

    Each student token has four values in the projection; each token that is not common begins with a common
    one.
    """
    sizes = shape.student_vocab, shape.teacher_vocab
    count = round(COMMON * min(sizes))
    students, teachers = (random.permutation(size)[:count] for size in sizes)
    students.sort()
    rows, columns = np.repeat(np.arange(sizes[0]), 4), random.integers(0, sizes[1], 4 * sizes[0])
    projection = SparseMatrix.from_entries(rows, columns, random.random(len(rows)) + 0.1, sizes).normalised()
    nothing = Continuations(
        Pieces.from_sequences([]), np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
    )
    beginnings = [random.choice(students, size) for size in sizes]  # the student's id of the common token
    for own, ids in zip(beginnings, (students, teachers), strict=True):
        own[ids] = students
    none = np.zeros(0, np.int64)
    return VocabularyRelation(
        *sizes, students, teachers, none, none, projection, Spellings(nothing, nothing), *beginnings
    )


def _chunks(shape: ChunkShape, random: np.random.Generator) -> ChunkBatch:
    counts = [max(1, round(share * shape.chunks)) for share, *_ in KINDS.values()]
    kinds = np.repeat(np.arange(len(KINDS)), counts)
    sides = []
    for side, vocab in enumerate((shape.student_vocab, shape.teacher_vocab)):
        offsets = np.concatenate([[0], np.cumsum([KINDS[kind][1 + side] for kind in kinds])])
        rows, labels = np.arange(offsets[-1]), random.integers(0, vocab, offsets[-1])
        sides.append(ChunkSide(*(torch.from_numpy(a) for a in (rows, labels, offsets)), offsets))
    pairs = np.array([{ONE_TO_ONE: 0, MANY_TO_MANY: 1}.get(kind, SUPPORT) for kind in kinds])
    supports = [
        np.concatenate(
            [
                np.zeros(0, np.int64),
                *(random.choice(vocab, number, replace=False) for number in pairs if number),
            ]
        )
        for vocab in (shape.student_vocab, shape.teacher_vocab)
    ]
    return ChunkBatch(
        *sides,
        kinds.astype(np.int8),
        torch.ones(len(kinds)),
        torch.zeros(len(kinds), dtype=torch.int64),
        np.concatenate([[0], np.cumsum(pairs)]),
        torch.from_numpy(np.repeat(np.arange(len(kinds)), pairs)),
        *(torch.from_numpy(ids) for ids in supports),
        len(kinds),
    )
