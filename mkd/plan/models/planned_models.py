"""The student and the teachers of known shape, with their settings of layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mkd.config.options import settings
from mkd.config.schema import Config
from mkd.errors import UsageError
from mkd.plan.layout import PipelineLayout
from mkd.plan.models.model_shape import ModelShape


class PlannedModel(NamedTuple):
    """The student or a teacher, with what is known about its layers."""

    role: str  # student, teacher, or teacher NAME
    shape: ModelShape
    layout: str | None  # as given
    layout_flag: str  # flag that sets it, or key of a file for teachers without flags
    teacher: int | None = None  # number of the teacher; None: the student

    @property
    def expert_flag(self) -> str:
        """Flag that sets the processes of its experts, or key of a file for teachers without flags."""
        if self.teacher is None:
            return "--expert-model-parallel-size"
        if self.teacher == 0:
            return "--teacher-expert-model-parallel-size"
        return f"teachers[{self.teacher}].expert_model_parallel_size"


def planned_models(
    config: Config,
    roles: Sequence[str],  # of the teachers
    shapes: Sequence[ModelShape | None],  # of the student and of teachers
) -> Iterator[PlannedModel]:
    """Yield the student and the teachers, except those whose shape is None."""
    assert len(shapes) <= 1 + len(config.teachers)
    models = zip(("student", *roles), shapes, given_layouts(config), layout_flags(config), strict=False)
    for index, (role, shape, layout, flag) in enumerate(models):
        if shape is not None:
            yield PlannedModel(role, shape, layout, flag, index - 1 if index else None)


def given_layouts(config: Config) -> list[str | None]:
    """Return the explicit layout of the student and of each teacher; None if it has none."""
    return [config.student.pipeline_layout, *(teacher.pipeline_layout for teacher in config.teachers)]


def layout_flags(config: Config) -> list[str]:
    """Return the flag or key that sets the layout of the student and of each teacher."""
    names = "student_pipeline_layout", "teacher_pipeline_layout"
    return [option.place for option, _ in settings(config) if option.name in names]


def one_layout(config: Config, model: PlannedModel, stages: int) -> PipelineLayout:
    """Return the layout of one model, as given or even. Raises UsageError, which names the model.

    `stages` are the virtual stages of each pipeline rank.
    """
    pipeline, layers = config.parallel.pipeline_model_parallel_size, model.shape.num_layers
    try:
        return PipelineLayout.create(model.layout, layers, pipeline, stages, flag=model.layout_flag)
    except UsageError as error:
        raise error.located(model.role) from error
