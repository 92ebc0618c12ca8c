"""The models in a plan: the teachers with the tokens that each reads, and the student beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mkd.config.schema import Config, TeacherConfig
from mkd.families.layer_shape import LayerShape
from mkd.plan.models.expert_parallel import expert_parallel_size
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.parameters import layer_parameters, product_parameters
from mkd.plan.work import Work

FP8_BLOCK = 128
"""Rows and columns of weights with one scale, in the blockwise recipe."""


@dataclass(frozen=True)
class Teacher:
    """A teacher that runs, with its settings."""

    shape: ModelShape
    role: str
    seq_length: int  # tokens of its packs; until the data are known, by default the student's number
    is_cross_tokenizer: bool  # its tokenizer differs from the student's
    residency: str  # place of the decoder layers: device, host or peers
    peers: int = 1  # processes that keep equal parts of every layer
    expert_parallel: int = 1  # processes that share its experts
    fp8_recipe: str | None = None  # scales of its FP8 products; None: its layers run in the run's precision

    @property
    def is_streamed(self) -> bool:
        """True if decoder layers come to the device one after another."""
        return self.residency != "device"


@dataclass(frozen=True)
class Pair:
    """All models of a run, and what besides decides the cost of a micro-batch."""

    config: Config
    student: ModelShape
    teachers: tuple[Teacher, ...]  # the ones that run
    document_length: int  # student tokens of a typical document
    work: Work  # what features add

    @cached_property
    def expert_parallel(self) -> int:
        """Processes that share the student's experts."""
        return expert_parallel_size(self.config, self.student)

    @cached_property
    def same_tokens(self) -> tuple[ModelShape, ...]:
        """The student and the teachers that read its tokens. Their heads are padded alike."""
        return (self.student, *(one.shape for one in self.teachers if not one.is_cross_tokenizer))

    @property
    def known_ids(self) -> int:
        """Number of ids that all of `same_tokens` know."""
        return min(shape.vocab_size for shape in self.same_tokens)


def plan_teachers(config: Config, roles: Sequence[str], shapes: Sequence[ModelShape]) -> tuple[Teacher, ...]:
    """Combine `shapes` (none if no teacher runs) with the roles and settings of teachers, in their order."""
    assert len(shapes) <= len(config.teachers), f"{len(shapes)} shapes of {len(config.teachers)} teachers"
    return tuple(
        Teacher(
            shape=shape,
            role=role,
            seq_length=(teacher.xtoken.seq_length if teacher.xtoken else None) or config.training.seq_length,
            is_cross_tokenizer=teacher.xtoken is not None,
            residency=teacher.residency,
            peers=teacher.peers or 1,
            expert_parallel=expert_parallel_size(config, shape, index),
            fp8_recipe=teacher.fp8_recipe if teacher.precision == "fp8" else None,
        )
        for index, (shape, role, teacher) in enumerate(zip(shapes, roles, config.teachers, strict=False))
    )


def rounding(teacher: TeacherConfig, scores: str = "p_t") -> str:
    """Return what FP8 changes in the `scores` of a teacher that runs, for the loss card."""
    if teacher.precision != "fp8" or teacher.topk:
        return ""
    return f"; {scores} of layers in FP8 (E4M3, {teacher.fp8_recipe} scales)"


def layer_bytes(teacher: Teacher, layer: LayerShape, tensor_parallel: int, element: int) -> int:
    """Return the bytes of a layer of the teacher on one process.

    `element` is the bytes of a weight that is not FP8.
    """
    parameters = layer_parameters(teacher.shape, layer, tensor_parallel, teacher.expert_parallel).total
    if teacher.fp8_recipe is None:
        return parameters * element
    fp8 = product_parameters(teacher.shape, layer, tensor_parallel)
    scales = 4 * fp8 // FP8_BLOCK**2 if teacher.fp8_recipe == "blockwise" else 0
    return fp8 + scales + (parameters - fp8) * element
