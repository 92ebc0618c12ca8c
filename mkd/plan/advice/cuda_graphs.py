"""Which models run as CUDA graphs, what that takes, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mkd.plan.facts import RunFacts
from mkd.plan.footprint.memory import predict_graphs
from mkd.plan.forecast import Forecast
from mkd.plan.models.model_shape import ModelShape


@dataclass(frozen=True)
class PlannedGraphs:
    """The models of a run whose decoder layers run as graphs."""

    roles: tuple[str, ...]  # the student, then each teacher that runs
    reasons: tuple[str | None, ...]  # why a model runs without; None: it runs as graphs
    kept_gib: float  # of the fullest process, beside the rest of the plan

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
        return f"layers as CUDA graphs: {graphed} ({self.kept_gib:.1f} GiB more)" + (
            f"; without: {without}" if without else ""
        )


def planned_graphs(forecast: Forecast) -> PlannedGraphs:
    """Choose what runs as graphs: everything that can, unless the GPU is known to have too little memory."""
    facts = forecast.facts
    reasons = list(_reasons(facts))
    roles = ("student", *(teacher.role for teacher in facts.planned_teachers))
    usable_gib = forecast.usable_gib()
    for dropped in (None, 0, *range(1, len(reasons))):  # the student keeps most
        if dropped is not None and reasons[dropped] is None:
            reasons[dropped] = "the memory of the GPU is needed otherwise"
        on = [reason is None for reason in reasons]
        kept_gib = predict_graphs(facts, on[0], on[1:])
        if usable_gib is None or forecast.need_gib(forecast.states_ahead) + kept_gib <= usable_gib:
            break
    return PlannedGraphs(roles, tuple(reasons), kept_gib)


def _reasons(facts: RunFacts) -> Iterator[str | None]:
    """Yield why layers cannot be graphs, for the student and each teacher that runs; None: they can."""
    if facts.config.training.cuda_graphs == "off":
        yield from ["--cuda-graphs off"] * (1 + len(facts.planned_teachers))
        return
    yield _of_shape(facts.pair.student)
    for teacher in facts.planned_teachers:
        yield "layers that move run one by one" if teacher.place.streams else _of_shape(teacher.shape)


def _of_shape(shape: ModelShape) -> str | None:
    if shape.moe is not None:
        return "experts wait for the numbers of their tokens"
    if shape.vision is not None:
        return "rows with images differ in shape"
    if any(layer.mixer is not None for layer in shape.layers):
        return "the kernels of mixers have not been tried in graphs"
    if any(layer.heads is not None and layer.heads.is_wide for layer in shape.layers):
        return "attention with wide heads waits for the lengths of documents"
    is_plain = all(rope.is_plain_rotation for rope in shape.ropes)
    return None if is_plain else "its rotation of positions waits for the lengths of documents"
