"""Build this rank's parts of the models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from mkd.models.language_model import LanguageModel
from mkd.models.stage import DistillationStage
from mkd.models.stored_head import StoredHead
from mkd.models.transformer_config import ModelOptions
from mkd.models.vision.vision_model import VisionLanguageModel
from mkd.parallel.context import ParallelContext
from mkd.plan.layout import PipelineLayout
from mkd.plan.models.lora_shape import is_factor
from mkd.plan.models.model_shape import ModelShape


def build_model_parts(
    shape: ModelShape,
    layout: PipelineLayout,
    options: ModelOptions,
    context: ParallelContext,
    padded_vocab_size: int | None = None,
) -> list[LanguageModel]:
    """Build one model part per virtual stage, without weights.

    Collective: all ranks build in the same order.
    """
    part = LanguageModel if shape.vision is None else VisionLanguageModel
    return [
        part(shape, layout, options, context, virtual_stage=stage, padded_vocab_size=padded_vocab_size)
        for stage in range(context.virtual_stages)
    ]


def build_base_parts(
    students: Sequence[LanguageModel], build: Callable[[], list[LanguageModel]]
) -> list[LanguageModel]:
    """Return the students without their adapters, as parts of a teacher.

    `build` makes the parts, with norms apart as those of the students. Their parameters become the students',
    so that they take no memory. Buffers are copied, because training may change a student's.
    """
    parts = build()
    for student, part in zip(students, parts, strict=True):
        known = dict(student.named_parameters())
        for name, _ in list(part.named_parameters()):
            module, _, leaf = name.rpartition(".")
            part.get_submodule(module).register_parameter(leaf, known[name])
        buffers = dict(student.named_buffers())
        for name, buffer in part.named_buffers():
            buffer.copy_(buffers[name])
    return parts


@torch.no_grad()
def build_copied_parts(
    students: Sequence[LanguageModel],
    layout: PipelineLayout,
    options: ModelOptions,  # those of the students; releases layers of students with adapters
    context: ParallelContext,
    padded_vocab_size: int,
) -> list[LanguageModel]:
    """Return copies of the students as parts of a teacher, which shares what they do not learn."""
    parts = build_model_parts(students[0].shape, layout, options, context, padded_vocab_size)
    for student, part in zip(students, parts, strict=True):
        known = dict(student.named_parameters())
        for name, own in list(part.named_parameters()):
            if not known[name].requires_grad:
                module, _, leaf = name.rpartition(".")
                part.get_submodule(module).register_parameter(leaf, known[name])
            elif is_factor(name):  # it has no memory yet
                own.data = known[name].detach().clone()
            else:
                own.copy_(known[name])
        buffers = dict(student.named_buffers())
        for name, buffer in part.named_buffers():
            buffer.copy_(buffers[name])
    return parts


def train_parts(parts: Sequence[LanguageModel], names: Collection[str]) -> None:
    """Let the named parts of a model with images learn; `tower` and `projector` are frozen otherwise."""
    for part in parts:
        if isinstance(part, VisionLanguageModel) and part.tower is not None:
            part.tower.train_parts(names)


def join_stages(
    students: Sequence[LanguageModel],
    teachers: Sequence[Sequence[LanguageModel]] = (),
    heads: Sequence[StoredHead] = (),  # of teachers that do not run here
    numbers: Sequence[int] = (),  # of `teachers`, then of `heads`, in the run
) -> list[DistillationStage]:
    """Join the parts of the student and of each teacher, virtual stage by virtual stage."""
    return [
        DistillationStage(
            student,
            [parts[stage] for parts in teachers],
            heads if student.post_process else (),
            numbers[: None if student.post_process else len(teachers)],
        )
        for stage, student in enumerate(students)
    ]


def common_padded_vocab_size(shapes: Sequence[ModelShape], tensor_parallel: int) -> int:
    """Return the padded vocabulary rows of all heads.

    All models are padded alike, so that an id's logits are on the same rank for each of them.
    """
    return max(shape.padded_vocab_size(tensor_parallel) for shape in shapes)
