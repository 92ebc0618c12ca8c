"""Check what models with images need: parts that can be trained, and layers that take features."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from mkd.errors import MkdError, UsageError, collect_error
from mkd.plan.checks.no_effect import no_effect
from mkd.plan.facts import RunFacts
from mkd.plan.layout import PipelineLayout
from mkd.plan.models.planned_models import PlannedModel

PARTS = ("text", "projector", "tower")
FLAG = "student-train-parts"


def check_train_parts(facts: RunFacts) -> Iterator[UsageError]:
    """Check the names of the parts that learn; the text model always does."""
    parts = facts.config.student.train_parts
    for unknown in (one for one in parts if one not in PARTS):
        what = f"{FLAG}: {unknown!r} is not a known value"
        yield UsageError(what, "", f"use {', '.join(PARTS)}", code="value-unknown")
    if "text" not in parts:
        what = f"{FLAG} {' '.join(parts)} leaves out text"
        why = "the divergence is on the tokens of the text model, which mkd always trains"
        yield UsageError(what, why, "add text", code="value-not-valid")


def check_vision(facts: RunFacts) -> Iterator[MkdError]:
    """Check that each model's first part holds the layers that take features of its tower."""
    student, settings = facts.student, facts.config.student
    parts = settings.train_parts
    if student is not None and student.vision is None and parts != type(settings)().train_parts:
        yield no_effect(f"{FLAG} {' '.join(parts)}", "the student takes no images", "remove it")
    share, data = facts.config.data.image_token_share, type(facts.config.data)()
    see_images = (shape is None or shape.vision is not None for shape in (student, *facts.teachers))
    if share != data.image_token_share and not any(see_images):
        yield no_effect(f"image-token-share {share}", "no model takes images", "remove it")
    if facts.config.parallel.pipeline_layout == "auto":
        return  # `require_deepstack_layers` checks layouts that are chosen
    for model in facts.models:
        layout = collect_error([], partial(facts.layout_of, model))  # `check_layouts` reports the error
        if layout is not None:
            yield from first_part_problems(model, layout)


def require_deepstack_layers(facts: RunFacts) -> None:
    """Raise `UsageError` if the first part of the student or a teacher lacks a layer with features."""
    student, teachers = facts.layouts
    for model, layout in zip(facts.models, (student, *teachers), strict=True):
        for problem in first_part_problems(model, layout):
            raise problem


def first_part_problems(model: PlannedModel, layout: PipelineLayout) -> Iterator[UsageError]:
    """Yield an error if the first part lacks a layer that takes features of the tower."""
    needed = model.shape.vision.deepstack if model.shape.vision else 0
    if layout.layers[0] >= needed:
        return
    yield UsageError(
        f"the {model.role}'s first pipeline stage has {layout.layers[0]} layers, its first {needed} take "
        "features of the vision tower",
        "the tower is on that stage, and its features do not travel to others",
        f"give the first stage {needed} layers or more with {model.layout_flag}, or use fewer stages",
        code="layout-not-valid",
    )
