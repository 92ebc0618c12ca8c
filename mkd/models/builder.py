"""Builds this rank's chunks of the pair."""

from __future__ import annotations

from mkd.models.language_model import LanguageModel
from mkd.models.stage import PairStage
from mkd.models.transformer_config import ModelOptions
from mkd.parallel.context import ParallelContext
from mkd.plan.layout import PipelineLayout
from mkd.plan.model_shape import ModelShape


def build_chunks(
    shape: ModelShape,
    layout: PipelineLayout,
    options: ModelOptions,
    context: ParallelContext,
    padded_vocab_size: int | None = None,
) -> list[LanguageModel]:
    """One chunk per virtual stage of this rank, weights uninitialised. Collective: all ranks build in the same order."""
    return [
        LanguageModel(shape, layout, options, context, virtual_stage=stage, padded_vocab_size=padded_vocab_size)
        for stage in range(context.virtual_stages)
    ]


def pair_stages(students: list[LanguageModel], teachers: list[LanguageModel] | None) -> list[PairStage]:
    """Join the chunks of both models, virtual stage by virtual stage."""
    if teachers is None:
        return [PairStage(student, None) for student in students]
    return [PairStage(student, teacher) for student, teacher in zip(students, teachers, strict=True)]


def common_padded_vocab_size(student: ModelShape, teacher: ModelShape | None, tensor_parallel: int) -> int:
    """Vocabulary rows of both heads: padded alike, so that every id has its logits of both models on the same rank."""
    shapes = [student] if teacher is None else [student, teacher]
    return max(shape.padded_vocab_size(tensor_parallel) for shape in shapes)
