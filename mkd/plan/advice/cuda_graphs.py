"""Which models run as CUDA graphs, and why the others do not."""

from __future__ import annotations

from mkd.plan.facts import RunFacts
from mkd.plan.models.model_shape import ModelShape


def graphed_models(facts: RunFacts) -> tuple[bool, tuple[bool, ...]]:
    """Return whether the student's layers run as graphs, and those of each teacher that runs."""
    reasons = eager_reasons(facts)
    return reasons[0] is None, tuple(reason is None for reason in reasons[1:])


def eager_reasons(facts: RunFacts) -> list[str | None]:
    """Return why layers do not run as graphs, of the student and of each teacher that runs.

    None: they do.
    """
    training = facts.config.training
    if training.cuda_graphs == "off":
        return ["--cuda-graphs off"] * (1 + len(facts.planned_teachers))
    student = _of_shape(facts.student)
    if student is None and training.optimizer_residency == "host":
        student = "--optimizer-residency host needs the memory that its activations would keep"
    teachers = facts.planned_teachers
    return [student, *("its weights move" if one.is_streamed else _of_shape(one.shape) for one in teachers)]


def _of_shape(shape: ModelShape) -> str | None:
    if shape.moe is not None:
        return "its experts wait for the numbers of their tokens"
    return "it reads images" if shape.vision is not None else None
