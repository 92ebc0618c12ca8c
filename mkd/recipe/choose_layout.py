"""Where the teacher lives and how both models are split over GPUs: the fastest plan that fits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mkd.config.options import settings as settings_of
from mkd.config.schema import Config
from mkd.errors import MkdError, UsageError
from mkd.human import counted, milliseconds
from mkd.kinds.known_kinds import KINDS
from mkd.plan.advice.teacher_place import WITHOUT_LAYERS, choose, plan_places
from mkd.plan.advice.verdict import Remedy, fullest_rank, remedies
from mkd.plan.facts import RunFacts
from mkd.plan.forecast import Forecast
from mkd.plan.times.hardware import MACHINE, USABLE
from mkd.recipe.first_request import Request
from mkd.recipe.settings import Settings

MICRO_BATCHES = (1, 2, 4, 8)
SHOWN = {
    "parallel.tensor_model_parallel_size": "every GPU holds whole layers",
    "parallel.pipeline_model_parallel_size": "and all of them",
    "teachers[0].residency": "the teacher's layers stay on the GPU",
    "training.micro_batch_size": "packs at once; more were not faster, or do not fit",
}
"""Settings that are written even if they have their defaults, and what they mean then."""
FASTER = 1.02  # a larger micro-batch takes memory, and must be faster by this factor


class DoesNotFit(UsageError):
    """A pair for which no plan fits the memory of its GPUs."""


@dataclass(frozen=True)
class Layout:
    """A plan that fits, and the reasons."""

    forecast: Forecast
    reasons: dict[str, str]  # path of a setting -> why it differs from the simplest layout


def first_forecast(request: Request, settings: Settings) -> Forecast:
    """Predict a run whose processes all hold both models. Raises ErrorList with what is wrong."""
    facts = RunFacts(
        settings.config(),
        request.processes,
        student=request.student_shape,
        teachers=(request.teacher_shape,) if settings.config().needs_models else (),
        kinds=KINDS,
    )
    return Forecast.from_facts(facts)


def put_data_parallel(request: Request, settings: Settings) -> None:
    """Choose what several data-parallel processes always want."""
    if request.gpus > 1:
        why = f"shared by {counted(request.gpus, 'GPU')}: a GPU keeps only its part of Adam's state"
        settings.put("parallel.use_distributed_optimizer", True, why)
        settings.put("parallel.overlap_grad_reduce", True, "while backward computes")
        settings.put("parallel.overlap_param_gather", True, "while the next forward computes")


def choose_layout(request: Request, settings: Settings) -> Forecast:
    """Choose the place of the teacher, the micro-batch and the layout. Return the prediction.

    Without the memory of a GPU there is nothing to choose. Raises UsageError if nothing fits.
    """
    forecast = first_forecast(request, settings)
    if not request.gpus or request.gpu_gib is None:
        return forecast
    usable = USABLE * request.gpu_gib
    placed = _placed(forecast, usable)
    if placed is None or placed.forecast.config.teachers[0].residency != "device":
        others = (placed, _remedied(forecast, usable), _split(forecast, usable))
        fitting = [one for one in others if one is not None]
        if not fitting:
            raise _nothing_fits(request, forecast, usable)
        placed = min(fitting, key=lambda one: one.forecast.planned_step_ms())
    placed = _with_larger_batches(placed, usable, settings)
    _put_differences(settings, placed)
    return placed.forecast


def _placed(forecast: Forecast, usable: float) -> Layout | None:
    """Return the plan with the teacher where it is fastest, in the precision of the run."""
    planned = [one for one in plan_places(forecast) if one.place not in WITHOUT_LAYERS and one.place.is_exact]
    chosen = choose(planned, usable)
    if chosen is None:
        return None
    compared = "; ".join(
        f"{one.place.name}: {milliseconds(one.step_ms)}, {one.need_gib:.1f} GiB"
        + ("" if one.need_gib <= usable else " (does not fit)")
        for one in planned
    )
    why = f"the fastest place of the teacher that fits {usable:.1f} GiB. {compared}"
    placed = forecast.with_config(chosen.place.apply(forecast.config))
    why_stored = "experts stay as the checkpoint stores them, because in bf16 they take more memory"
    reasons = {"teachers[0].residency": why, "teachers[0].peers": "processes that share a copy"}
    return Layout(placed, reasons | {"teachers[0].precision": why_stored})


def _remedied(forecast: Forecast, usable: float) -> Layout | None:
    """Return the plan with the changes that `mkd plan` would propose first."""
    found = remedies(forecast, usable)
    return _with(found[0], forecast) if found else None


def _with(remedy: Remedy, forecast: Forecast) -> Layout:
    _, need = fullest_rank(forecast)
    why = f"with both models whole on each GPU the run needs {need:.1f} GiB; the fastest layout that fits"
    return Layout(
        remedy.forecast, {path: why for path in _differences(forecast.config, remedy.forecast.config)}
    )


def _split(forecast: Forecast, usable: float) -> Layout | None:
    """Return a plan with tensor parallelism, and further changes on top of it."""
    sizes = (size for size in (2, 4, 8) if size <= min(forecast.num_gpus, MACHINE))
    for size in sizes:
        parallel = replace(forecast.config.parallel, tensor_model_parallel_size=size, sequence_parallel=True)
        try:
            wider = forecast.with_config(replace(forecast.config, parallel=parallel))
        except MkdError:
            continue
        found = _placed(wider, usable) or _remedied(wider, usable)
        if found is not None:
            _, need = fullest_rank(forecast)
            why = f"with both models whole on each GPU the run needs {need:.1f} GiB; "
            why += "the fastest layout that fits"
            changed = _differences(forecast.config, found.forecast.config)
            return Layout(found.forecast, {path: why for path in changed} | found.reasons)
    return None


def _with_larger_batches(layout: Layout, usable: float, settings: Settings) -> Layout:
    """Return the plan with the micro-batch that is fastest, in the same global batch."""
    best, config = layout, layout.forecast.config
    if "training.micro_batch_size" in settings.given:
        return layout
    for size in MICRO_BATCHES[1:]:
        training = replace(config.training, micro_batch_size=size)
        try:
            larger = layout.forecast.with_config(replace(config, training=training))
        except MkdError:  # the global batch does not divide
            continue
        before, after = best.forecast.step_ms(), larger.step_ms()
        if fullest_rank(larger)[1] <= usable and after * FASTER < before:
            why = f"packs at once: a step takes {milliseconds(after)} instead of {milliseconds(before)}"
            best = Layout(larger, layout.reasons | {"training.micro_batch_size": why})
    return best


def _put_differences(settings: Settings, layout: Layout) -> None:
    values = {option.path: value for option, value in settings_of(layout.forecast.config)}
    for path, why in SHOWN.items():
        settings.put(path, values[path], layout.reasons.get(path, why))
    for path, value in _differences(settings.config(), layout.forecast.config).items():
        settings.put(path, value, layout.reasons.get(path, ""))


def _differences(before: Config, after: Config) -> dict[str, Any]:
    """Return path -> value of every setting of `after` that is another one."""
    values = {option.path: value for option, value in settings_of(before)}
    return {option.path: value for option, value in settings_of(after) if values.get(option.path) != value}


def _nothing_fits(request: Request, forecast: Forecast, usable: float) -> UsageError:
    _, need = fullest_rank(forecast)
    return DoesNotFit(
        f"the pair does not fit {counted(request.gpus, 'GPU')} of {request.gpu_gib:g} GiB",
        f"with both models whole on each GPU it needs {need:.1f} GiB, {usable:.1f} are usable, and no "
        "layout, batch, recomputation or place of the teacher that mkd tries makes it fit",
        "use more GPUs or a smaller student, or store the teacher's states first (mkd hidden, or mkd topk)",
        code="numbers-contradict",
    )
