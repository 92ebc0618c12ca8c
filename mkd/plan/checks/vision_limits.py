"""Check what models with images need: parts that can be trained, and layers that take features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from mkd.config.schema import Config
from mkd.errors import MkdError, UsageError, collect_error
from mkd.plan.auto_layout import PlannedModel, one_layout, planned_models, virtual_stages
from mkd.plan.checks.no_effect import no_effect
from mkd.plan.layout import PipelineLayout
from mkd.plan.model_shape import ModelShape

PARTS = ("text", "projector", "tower")
FLAG = "student-train-parts"


def check_train_parts(config: Config) -> Iterator[UsageError]:
    """Check the names of the parts that learn; the text model always does."""
    parts = config.student.train_parts
    for unknown in (one for one in parts if one not in PARTS):
        what = f"{FLAG}: {unknown!r} is not a known value"
        yield UsageError(what, "", f"use {', '.join(PARTS)}", code="value-unknown")
    if "text" not in parts:
        what = f"{FLAG} {' '.join(parts)} leaves out text"
        why = "the divergence is on the tokens of the text model, which mkd always trains"
        yield UsageError(what, why, "add text", code="train-parts-without-text")


def check_vision(config: Config, world_size: int, models: Sequence[PlannedModel]) -> Iterator[MkdError]:
    """Check that each model's first part holds the layers that take features of its tower."""
    student = next((model.shape for model in models if model.role == "student"), None)
    parts = config.student.train_parts
    if student is not None and student.vision is None and parts != type(config.student)().train_parts:
        yield no_effect(f"{FLAG} {' '.join(parts)}", "the student takes no images", "remove it")
    stages = collect_error([], lambda: virtual_stages(config, student)) if student else 1
    if stages is None or config.parallel.pipeline_layout == "auto":
        return  # check_layouts reports the one; `require_deepstack_layers` checks layouts that are chosen
    for model in models:
        layout = collect_error([], partial(one_layout, config, model, stages))
        if layout is not None:
            yield from first_part_problems(model.role, model.layout_flag, model.shape, layout)


def require_deepstack_layers(
    config: Config, shapes: Sequence[ModelShape], layouts: Sequence[PipelineLayout]
) -> None:
    """Raise `UsageError` if the first part of the student or a teacher lacks a layer with features."""
    for model, layout in zip(planned_models(config, shapes), layouts, strict=True):
        for problem in first_part_problems(model.role, model.layout_flag, model.shape, layout):
            raise problem


def first_part_problems(
    role: str, flag: str, shape: ModelShape, layout: PipelineLayout
) -> Iterator[UsageError]:
    """Yield an error if the first part lacks a layer that takes features of the tower."""
    needed = shape.vision.deepstack if shape.vision else 0
    if layout.layers[0] >= needed:
        return
    yield UsageError(
        f"the {role}'s first pipeline stage has {layout.layers[0]} layers, its first {needed} take "
        "features of the vision tower",
        "the tower is on that stage, and its features do not travel to others",
        f"give the first stage {needed} layers or more with {flag}, or use fewer stages",
        code="deepstack-beyond-first-stage",
    )
