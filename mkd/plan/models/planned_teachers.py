"""The models in a plan: the teachers with the tokens that each reads, and the student beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mkd.config.models import EMA
from mkd.config.schema import Config, TeacherConfig
from mkd.families.layer_shape import LayerShape
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.placement import TeacherPlace, TeacherPrecision
from mkd.plan.parallel_sizes import ONE_PROCESS, Sizes, model_sizes
from mkd.plan.work import Work


@dataclass(frozen=True)
class Teacher:
    """A teacher that runs, or one whose head makes logits of stored hidden states, with its settings."""

    shape: ModelShape
    role: str
    seq_length: int  # tokens of its packs; until the data are known, by default the student's number
    is_cross_tokenizer: bool  # its tokenizer differs from the student's
    place: TeacherPlace  # of its decoder layers
    precision: TeacherPrecision  # of their products
    is_length_known: bool = True  # False: `seq_length` is the student's until the data are read
    has_own_row: bool = False  # it reads another row of tokens, in a pass over the heads of its own
    sizes: Sizes = ONE_PROCESS  # processes along each axis, replicas aside
    share: float = 1.0  # expected share of the micro-batches in which it runs
    is_averaged: bool = False  # its weights are a moving average of the student's
    number: int = 0  # in the configuration

    @property
    def product_time(self) -> float:
        """Time of its layers' products over the time in the run's precision."""
        return self.precision.product_time(self.shape)

    def layer_bytes(self, layer: LayerShape, element: int) -> int:
        """Return the bytes of a layer on one process. `element`: bytes of a weight in the run's precision."""
        return self.precision.layer_bytes(self.shape, layer, self.sizes, element)


@dataclass(frozen=True)
class Pair:
    """All models of a run, and what besides decides the cost of a micro-batch."""

    config: Config
    student: ModelShape
    teachers: tuple[Teacher, ...]  # the ones that run
    heads: tuple[Teacher, ...]  # those whose hidden states are stored: only their heads are here
    document_length: int  # student tokens of a typical document
    work: Work  # what features add

    @cached_property
    def sizes(self) -> Sizes:
        """Processes along each axis for the student, replicas aside."""
        return model_sizes(self.config, self.student)

    @cached_property
    def same_tokens(self) -> tuple[ModelShape, ...]:
        """The student and the teachers that read its tokens. Their heads are padded alike."""
        return (self.student, *(one.shape for one in self.compared if not one.is_cross_tokenizer))

    @property
    def compared(self) -> tuple[Teacher, ...]:
        """All teachers whose heads make logits, in the order of the configuration."""
        return tuple(sorted((*self.teachers, *self.heads), key=lambda one: one.number))

    @property
    def known_ids(self) -> int:
        """Number of ids that all of `same_tokens` know."""
        return min(shape.vocab_size for shape in self.same_tokens)


def plan_teachers(
    config: Config,
    roles: Sequence[str],
    shapes: Mapping[int, ModelShape],  # by the numbers of the teachers
    place: Callable[[TeacherConfig], TeacherPlace],
    precision: Callable[[TeacherConfig], TeacherPrecision],
) -> tuple[Teacher, ...]:
    """Combine `shapes` (none if no teacher runs) with the roles and settings of teachers, in their order."""
    chosen = ((index, shape, config.teachers[index]) for index, shape in sorted(shapes.items()))
    return tuple(
        Teacher(
            shape=shape,
            role=roles[index],
            seq_length=teacher.own_seq_length or config.training.seq_length,
            is_cross_tokenizer=teacher.xtoken is not None,
            is_length_known=not teacher.has_own_row or teacher.own_seq_length is not None,
            has_own_row=teacher.has_own_row,
            place=place(teacher),
            precision=precision(teacher),
            sizes=model_sizes(config, shape, index),
            is_averaged=teacher.weights == EMA,
            number=index,
        )
        for index, shape, teacher in chosen
    )
