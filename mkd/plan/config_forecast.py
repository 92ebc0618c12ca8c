"""From a configuration and the shapes of its models to a forecast, with the verdict that --device-memory-gib asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mkd.config.schema import Config
from mkd.errors import ErrorList
from mkd.plan.batch import BatchPlan
from mkd.plan.checks.validate import layouts_of, validate, virtual_stages
from mkd.plan.cost import DOCUMENT_LENGTH
from mkd.plan.forecast import Forecast
from mkd.plan.model_shape import ModelShape
from mkd.plan.verdict import verdict


def forecast_of(
    config: Config,
    world_size: int,
    student: ModelShape,
    teachers: Sequence[ModelShape],  # those that run, in the order of the configuration
    document_length: int = DOCUMENT_LENGTH,
) -> Forecast:
    """The forecast of a run on `world_size` processes. Raises ErrorList with everything that is wrong."""
    problems = validate(config, world_size, student, teachers)
    if problems:
        raise ErrorList(problems)
    layouts = layouts_of(config, student, teachers, virtual_stages(config, student), document_length)
    return Forecast(
        config, BatchPlan.from_config(config, world_size), student, teachers, *layouts, document_length
    )


def describe(forecast: Forecast) -> str:
    """What `Forecast.describe` says and, where the memory of a GPU is given, whether the run fits or what would make it fit."""
    memory_gib = forecast.config.device_memory_gib
    if memory_gib is None:
        return forecast.describe()
    return f"{forecast.describe()}\n{verdict(forecast, memory_gib, planner(forecast))}"


def planner(forecast: Forecast) -> Callable[[Config], Forecast]:
    """Forecasts of the same models on as many GPUs with other settings; ErrorList for settings that cannot run."""

    def planned(config: Config) -> Forecast:
        return forecast_of(
            config, forecast.num_gpus, forecast.student, forecast.teachers, forecast.document_length
        )

    return planned
