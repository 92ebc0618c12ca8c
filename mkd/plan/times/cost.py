"""The time of one micro-batch on each pipeline stage.

Each teacher costs its forward. The student costs forward and backward (twice the forward), plus what it
recomputes (`layer_time.py`). The last stage also runs the LM heads and the loss. The fused head computes the
gradient during forward, so all of it is forward time there. `Forecast` adds the optimizer's update, copies
from and to the host, and layers of teachers that come from another place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from mkd.plan.layout import PipelineLayout
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.planned_teachers import Pair, Teacher
from mkd.plan.models.towers import towers_time
from mkd.plan.parallel_sizes import Sizes
from mkd.plan.times.layer_time import ModelTimer, Rates, WorkTime, milliseconds

DOCUMENT_LENGTH = 1024
"""Default length of a document in tokens, about that of web text. Attention costs in proportion to it."""


@dataclass(frozen=True)
class PairCost:
    """Times of a micro-batch on one process: every layer of each model, and the heads."""

    student: tuple[WorkTime, ...]  # of each layer, in model order
    teachers: tuple[tuple[WorkTime, ...], ...]  # of each layer of each teacher; no backward
    head_ms: float  # all heads and the loss, on the last stage
    towers: WorkTime = WorkTime(0.0, 0.0)  # vision towers of all models, on the first stage
    embeddings: tuple[WorkTime, ...] = ()  # collectives behind the embedding of each model
    head_collectives: WorkTime = WorkTime(0.0, 0.0)  # around the heads

    @property
    def models(self) -> tuple[tuple[WorkTime, ...], ...]:
        """Times of the layers of the student and of each teacher."""
        return (self.student, *self.teachers)

    @property
    def first(self) -> WorkTime:
        """Time of the first stage beside its layers."""
        return sum(self.embeddings[: len(self.models)], start=self.towers)

    @property
    def last(self) -> WorkTime:
        """Time of the last stage beside its layers."""
        return WorkTime(self.head_ms, 0.0) + self.head_collectives

    def with_shared(self, shares_base: Sequence[bool]) -> PairCost:
        """Return the cost with the marked teachers, whose weights are the student's, as parts of it."""
        marked = [one for one, shares in zip(self.teachers, shares_base, strict=True) if shares]
        others = tuple(one for one, shares in zip(self.teachers, shares_base, strict=True) if not shares)
        student = tuple(
            sum(layers[1:], start=layers[0]) for layers in zip(self.student, *marked, strict=True)
        )
        nothing = WorkTime(0.0, 0.0)
        embeddings = (sum(self.embeddings[: len(self.models)], start=nothing),)
        return replace(self, student=student, teachers=others, embeddings=embeddings)

    def stage_times(self, student: PipelineLayout, teachers: Sequence[PipelineLayout]) -> list[WorkTime]:
        """Return the time of every stage, in model order."""
        times = [WorkTime(0.0, 0.0)] * len(student.layers)
        for layers, layout in zip(self.models, (student, *teachers), strict=True):
            of_layers = iter(layers)
            for stage, count in enumerate(layout.layers):
                times[stage] = sum(islice(of_layers, count), start=times[stage])
        times[0] += self.first
        times[-1] += self.last
        return times


def pair_cost(
    pair: Pair,
    num_stages: int,  # pipeline ranks x virtual stages
    rates: Rates | None = None,
) -> PairCost:
    """Return the cost of a micro-batch under the parallel sizes and the recomputation of the configuration.

    Attention is counted for documents of `pair.document_length` tokens, or of a whole pack if that is
    shorter. Documents of a cross-tokenizer teacher are longer or shorter in proportion to its packs. Every
    token counts as a loss token, except the assumed image tokens. Block recomputation is counted as if stages
    were equal.
    """
    config, training = pair.config, pair.config.training
    rates = rates or Rates.of_precision(training.bf16)

    def timer(
        shape: ModelShape, seq_length: int, sizes: Sizes, matmul: float, *of_products: float
    ) -> ModelTimer:
        return ModelTimer(config, shape, seq_length, sizes, pair.document_length, rates, matmul, *of_products)

    own = pair.work.student
    product_time = own.product_time(pair.student.hidden_size) if own else 1.0
    learning = timer(pair.student, training.seq_length, pair.sizes, rates.student_matmul, product_time)
    matmul = rates.teacher_matmul
    frozen = [
        timer(one.shape, one.seq_length, one.sizes, matmul, one.product_time, one.precision.decoded_bytes)
        for one in pair.teachers
    ]
    head_flops = training.micro_batch_size * _head_flops(pair) / pair.sizes.row
    loss_share = 1.0 if pair.student.vision is None else 1 - config.data.image_token_share
    return PairCost(
        learning.student(num_stages),
        tuple(
            tuple(time.times(one.share) for time in timer.teacher())
            for one, timer in zip(pair.teachers, frozen, strict=True)
        ),
        milliseconds(loss_share * head_flops, rates.head),
        towers_time(config, pair.student, [one.shape for one in pair.teachers], rates),
        (
            learning.embedding(is_trained=not config.lora.is_on),
            *(
                timer.embedding(is_trained=False).times(one.share)
                for one, timer in zip(pair.teachers, frozen, strict=True)
            ),
        ),
        _head_collectives(pair, learning, frozen),
    )


def with_copies(teacher: Teacher, times: Sequence[WorkTime], element: int) -> tuple[WorkTime, ...]:
    """Return the layers of a teacher. If they are elsewhere, the next one comes while one computes."""
    layers = teacher.shape.layers
    copies_ms = {
        layer: teacher.share * teacher.place.transfer_ms(teacher.layer_bytes(layer, element))
        for layer in set(layers)
    }
    return tuple(
        replace(time, forward_ms=max(time.forward_ms, copies_ms[layer]))
        for time, layer in zip(times, layers, strict=True)
    )


class HeadPasses(NamedTuple):
    """Number of passes of a micro-batch through the heads.

    A single divergence over the student's tokens (an average of teachers is one) shares its pass with the
    cross entropy. Otherwise the cross entropy, or the policy loss, and each teacher have separate passes.
    Weights that depend on the pack read every teacher's logits a second time. Judged answers read the
    student's once more without gradient, because their coefficients come before the loss.
    """

    student: float  # with gradients
    scored: int  # of the student without
    teacher: int  # of each teacher that runs

    @classmethod
    def from_pair(cls, pair: Pair) -> HeadPasses:
        """Return the passes of a run."""
        kd, teachers = pair.config.kd, pair.compared
        has_own = any(teacher.has_own_row for teacher in teachers)
        divergences = min(len(teachers), 1) if kd.averages_teachers else len(teachers)
        is_shared = divergences < 2 and not has_own and not pair.work.own_head_pass
        is_shared |= pair.work.one_head_pass
        left_out = sum(1 - teacher.share for teacher in teachers)
        passes = 1 if is_shared else divergences - left_out + (kd.kd_ratio < 1)
        reads = 2 if len(teachers) > 1 and kd.weighs_packs else 1
        return cls(passes, int(pair.work.scores_tokens), reads)


def _head_flops(pair: Pair) -> float:
    """Count the FLOPs of the heads for one pack.

    The student's head runs with both gradients (3 products) in a pass, without its weight's if that is
    frozen. Each teacher's head runs once.
    """
    passes, student = HeadPasses.from_pair(pair), pair.student
    student_head = pair.config.training.seq_length * student.vocab_size * student.hidden_size
    of_pass = 4 if pair.config.lora.is_on else 6
    total = (of_pass * passes.student + 2 * passes.scored) * float(student_head)
    for teacher in pair.compared:
        vocab_size = teacher.shape.vocab_size if teacher.is_cross_tokenizer else student.vocab_size
        rows = teacher.share * passes.teacher * teacher.seq_length
        total += 2 * rows * vocab_size * teacher.shape.hidden_size
    return total


def _head_collectives(pair: Pair, student: ModelTimer, teachers: Sequence[ModelTimer]) -> WorkTime:
    """Return the time of the collectives of hidden states around all heads."""
    passes = HeadPasses.from_pair(pair)
    start = student.head(passes.student + passes.scored, passes.student)
    running = zip(pair.teachers, teachers, strict=True)
    return sum((timer.head(passes.teacher, 0).times(one.share) for one, timer in running), start=start)
