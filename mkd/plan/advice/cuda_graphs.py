"""Which models run as CUDA graphs, what that takes, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mkd.config.models import LIVE
from mkd.plan.facts import RunFacts
from mkd.plan.footprint.memory import predict_graphs
from mkd.plan.forecast import Forecast
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.planned_teachers import Teacher
from mkd.plan.serving_side import TeacherSide

NO_MEMORY = "the memory of the GPU is needed otherwise"


@dataclass(frozen=True)
class PlannedGraphs:
    """The models of a run whose decoder layers run as graphs."""

    roles: tuple[str, ...]  # the student, then each teacher that runs
    reasons: tuple[str | None, ...]  # why a model runs without; None: it runs as graphs
    kept_gib: float  # of the fullest process, beside the rest of the plan
    saved_gib: float = 0.0  # less activations, because the student's packs without graphs are recomputed

    @property
    def recomputes(self) -> bool:
        """True if the student's layers are computed again in the backward of packs without graphs."""
        return self.saved_gib > 0

    @property
    def student(self) -> bool:
        return self.reasons[0] is None

    @property
    def teachers(self) -> tuple[bool, ...]:
        return tuple(reason is None for reason in self.reasons[1:])

    def describe(self) -> str:
        """Return the line of the plan."""
        by_reason: dict[str | None, list[str]] = {}
        for role, reason in zip(self.roles, self.reasons, strict=True):
            by_reason.setdefault(reason, []).append(role)
        graphed = ", ".join(by_reason.pop(None, []))
        without = "; ".join(f"{', '.join(roles)} ({reason})" for reason, roles in by_reason.items())
        if not graphed:
            return f"layers without CUDA graphs: {without}"
        more = f"{self.kept_gib:.1f} GiB more"
        if self.recomputes:
            more += f"; packs without graphs recompute the student's layers, {self.saved_gib:.1f} GiB less"
        return f"layers as CUDA graphs: {graphed} ({more})" + (f"; without: {without}" if without else "")


@dataclass(frozen=True)
class ServedGraphs:
    """Graphs of the layers of a teacher on processes of its own."""

    reason: str | None  # why it runs without; None: it runs as graphs
    kept_gib: float  # of a process, beside the rest of its plan

    def describe(self) -> str:
        """Return the end of the side's line in the plan."""
        if self.reason is None:
            return f"layers as CUDA graphs ({self.kept_gib:.1f} GiB more)"
        return f"layers without CUDA graphs ({self.reason})"


def served_graphs(side: TeacherSide, student_replicas: int, usable_gib: float | None) -> ServedGraphs:
    """Choose whether a teacher on processes of its own runs as graphs: if it can, and the memory is there.

    `usable_gib` is that of a process; None: not known. `student_replicas`: those that it serves.
    """
    kept_gib = side.graphs_gib()
    reason = _of_teacher(side.teacher)
    if side.config.training.cuda_graphs == "off":
        reason = "--cuda-graphs off"
    if reason is None and usable_gib is not None and side.need_gib(student_replicas) + kept_gib > usable_gib:
        reason = NO_MEMORY
    return ServedGraphs(reason, kept_gib if reason is None else 0.0)


def planned_graphs(forecast: Forecast) -> PlannedGraphs:
    """Choose what runs as graphs: everything that can, unless the GPU is known to have too little memory.

    A pack without graphs needs its activations beside those of the graphs. If they do not fit, such packs are
    recomputed; if that does not help, the student runs without graphs, and then the teachers.
    """
    facts = forecast.facts
    reasons = list(_reasons(facts))
    roles = ("student", *(teacher.role for teacher in facts.planned_teachers))
    usable_gib, need_gib = forecast.usable_gib(), forecast.planned_gib
    for dropped in (None, 0, *range(1, len(reasons))):  # the student keeps most
        if dropped is not None and reasons[dropped] is None:
            reasons[dropped] = NO_MEMORY
        on = [reason is None for reason in reasons]
        kept_gib = predict_graphs(facts, on[0], on[1:])
        if usable_gib is None or need_gib + kept_gib <= usable_gib:
            break
        saved_gib = need_gib - _need_recomputed(forecast) if on[0] else 0.0
        if saved_gib > 0 and need_gib + kept_gib - saved_gib <= usable_gib:
            return PlannedGraphs(roles, tuple(reasons), kept_gib, saved_gib)
    return PlannedGraphs(roles, tuple(reasons), kept_gib)


def _need_recomputed(forecast: Forecast) -> float:
    """Return the memory that the run needs if all layers of the student are recomputed, GiB."""
    training = replace(
        forecast.config.training,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    config = replace(forecast.config, training=training)
    again = replace(forecast, facts=replace(forecast.facts, config=config))
    return again.need_gib(forecast.states_ahead)


def _reasons(facts: RunFacts) -> Iterator[str | None]:
    """Yield why layers cannot be graphs, for the student and each teacher that runs; None: they can."""
    if facts.config.training.cuda_graphs == "off":
        yield from ["--cuda-graphs off"] * (1 + len(facts.planned_teachers))
        return
    if any(teacher.weights == LIVE for teacher in facts.config.teachers):
        why = "the student is a teacher too, whose packs are longer"
        yield from [why] * (1 + len(facts.planned_teachers))
        return
    reason = _of_shape(facts.pair.student)
    if facts.config.lora.is_on:
        reason = "layers with adapters have not been tried in graphs"
    if facts.config.rounding.round_activations:
        reason = "rounded inputs have not been tried in graphs"
    yield reason
    yield from map(_of_teacher, facts.planned_teachers)


def _of_teacher(teacher: Teacher) -> str | None:
    if teacher.is_averaged:
        return "weights that are averaged have not been tried in graphs"
    if teacher.place.streams:
        return "layers that move run one by one"
    return _of_shape(teacher.shape)


def _of_shape(shape: ModelShape) -> str | None:
    if shape.vision is not None:
        return "rows with images differ in shape"
    has_mixers = any(layer.mixer is not None for layer in shape.layers)
    if has_mixers and shape.moe is not None:
        return "mixers beside experts have not been tried in graphs"
    if not all(layer.has_mlp and (layer.has_attention or layer.mixer is not None) for layer in shape.layers):
        return "layers of one block have not been tried in graphs"
    if any(layer.heads is not None and layer.heads.is_wide for layer in shape.layers):
        return "attention with wide heads waits for the lengths of documents"
    is_plain = all(rope.is_plain_rotation for rope in shape.ropes)
    return None if is_plain else "its rotation of positions waits for the lengths of documents"
