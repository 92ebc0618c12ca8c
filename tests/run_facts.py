"""Make the facts of runs for tests, and find their problems."""

from __future__ import annotations

from collections.abc import Sequence

from mkd.config.schema import Config
from mkd.errors import MkdError
from mkd.kinds.known_kinds import KINDS
from mkd.plan.checks.model_alone import ModelAlone, find_model_problems
from mkd.plan.checks.problems import find_problems
from mkd.plan.facts import RunFacts
from mkd.plan.forecast import Forecast
from mkd.plan.models.model_shape import ModelShape


def facts_of(
    config: Config,
    world_size: int = 1,
    student: ModelShape | None = None,
    teachers: Sequence[ModelShape | None] = (),
    **more,
) -> RunFacts:
    """Return the facts of a run, with the work of its features."""
    return RunFacts(config, world_size, student, tuple(teachers), kinds=KINDS, **more)


def forecast_of(
    config: Config,
    world_size: int,
    student: ModelShape,
    teachers: Sequence[ModelShape] = (),
    heads: Sequence[ModelShape] = (),  # of teachers whose hidden states are stored
) -> Forecast:
    """Predict a run. Raises ErrorList with every problem."""
    return Forecast.from_facts(facts_of(config, world_size, student, teachers, heads=tuple(heads)))


def problems_of(
    config: Config,
    world_size: int,
    student: ModelShape | None = None,
    teachers: Sequence[ModelShape | None] = (),
) -> list[MkdError]:
    """Return every problem of a run."""
    return find_problems(facts_of(config, world_size, student, teachers))


def problems_of_one(
    config: Config, world_size: int, shape: ModelShape | None, teacher: int | None = None
) -> list[MkdError]:
    """Return every problem of the student, or of the teacher of that number, that runs alone."""
    return find_model_problems(ModelAlone(config, world_size, shape, teacher, KINDS))
