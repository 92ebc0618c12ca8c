"""Where the teachers' weights can be, in each precision: time and memory of each place, and which to choose.

A precision other than the run's changes the teacher a little, so that the best place without it is named,
too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from operator import add

from mkd.errors import MkdError
from mkd.human import milliseconds, size
from mkd.plan.advice.own_processes import split_lines
from mkd.plan.facts import RunFacts
from mkd.plan.forecast import Forecast
from mkd.plan.models.placement import Variant
from mkd.plan.times.hardware import MACHINE

QUICKLY_PLANNED = 512
"""Most pipeline ranks x micro-batches at which places are compared with teachers ahead: seconds in all."""

TOPK_BYTES = 128 * (4 + 2) + 12
"""Bytes of a loss token in an export of `mkd topk` with its defaults, before compression."""

MILLION = 10**6

SAME_TIME = 1.001
"""Step times of which the longer is at most so many times the shorter count as equal."""


HIDDEN = Variant("stored hidden states", {"hidden": "FOLDER"})
"""No teacher runs, but its head. An export has to come first: `choose` takes it if no place fits."""


STORED = Variant("stored top-k", {"topk": "FOLDER"})
"""No teacher runs. An export has to come first, and the loss is another: `choose` takes it last."""


WITHOUT_LAYERS = (HIDDEN, STORED)


@dataclass(frozen=True)
class PlannedPlace:
    """A place and the forecast of a run with it."""

    place: Variant
    step_ms: float
    need_gib: float  # memory of the fullest process
    is_planned: bool = True  # False: `step_ms` is without teachers ahead, though they are


def running_variants(facts: RunFacts) -> list[Variant]:
    """Return the places of a teacher that runs, the simplest first, and the same in other precisions."""
    of_kinds = (kind.variants for kind in facts.kinds if kind.variants)
    return [reduce(add, variants) for variants in product(*of_kinds)]


def plan_places(
    forecast: Forecast, places: Sequence[Variant] | None = None, machine: int = MACHINE
) -> list[PlannedPlace]:
    """Return which of the `places` (None: all) are possible on machines of so many GPUs, in their order."""
    running: list[Variant] = running_variants(forecast.facts)
    planned: list[PlannedPlace] = []
    for place in (*running, *WITHOUT_LAYERS) if places is None else places:
        facts = replace(forecast.facts, config=place.apply(forecast.config))
        if place in WITHOUT_LAYERS:  # they exclude the settings that only a running teacher has
            alone = running[0].apply(facts.config)
            alone = replace(alone, parallel=replace(alone.parallel, teacher_prefetch="0"))
            heads = tuple(one.shape for one in facts.pair.compared) if place is HIDDEN else ()
            facts = replace(facts, config=alone, teachers=(), heads=heads)
        try:
            changed = Forecast.from_facts(facts, forecast.gpu_gib)
        except MkdError:
            continue
        if not separates_peers(changed, machine):
            need_gib = changed.planned_gib
            is_planned = not changed.states_ahead or _is_quickly_planned(changed)
            step_ms = changed.planned_step_ms() if is_planned else changed.step_ms()
            planned.append(PlannedPlace(place, step_ms, need_gib, is_planned))
    return planned


def _is_quickly_planned(forecast: Forecast) -> bool:
    return forecast.student_layout.pipeline_parallel * forecast.batch.num_microbatches <= QUICKLY_PLANNED


def choose(planned: Sequence[PlannedPlace], usable_gib: float) -> PlannedPlace | None:
    """Return the place with the shortest step among those that fit, the simplest of equal ones.

    A stored teacher is chosen if nothing else fits, with the same loss if possible. None: nothing fits.
    """
    fitting = [one for one in planned if one.need_gib <= usable_gib]
    running = [one for one in fitting if one.place not in WITHOUT_LAYERS]
    if not running:
        return fitting[0] if fitting else None
    shortest_ms = min(one.step_ms for one in running)
    return next(one for one in running if one.step_ms <= shortest_ms * SAME_TIME)


def describe_places(forecast: Forecast, usable_gib: float) -> list[str]:
    """Return a line for each place of the teachers, the chosen one marked. No line if no teacher runs."""
    if not forecast.teachers:
        return []
    planned, is_only = plan_places(forecast), len(forecast.config.teachers) == 1
    chosen = choose(planned, usable_gib)
    left_out = "" if all(one.is_planned for one in planned) else ", without teachers ahead"
    if chosen is None:
        lines = [f"the teacher fits nowhere without other changes{left_out}:"]
    else:
        line = f"cheapest place of the teacher that fits: {chosen.place.text(is_only)}; "
        if title := chosen.place.title:
            running = (one for one in planned if one.place not in WITHOUT_LAYERS)
            exact = choose([one for one in running if one.place.is_exact], usable_gib)
            line += f"without {title}"
            line += f": {exact.place.text(is_only)}; " if exact else " nothing fits; "
        lines = [f"{line}all places{left_out}:"]
    for one in planned:
        line = f"  {one.place.name}: {milliseconds(one.step_ms)}, {one.need_gib:.1f} GiB"
        line += "" if one.need_gib <= usable_gib else ", does not fit"
        lines.append(line + _export_text(forecast, one.place))
    on_device = [
        one for one in running_variants(forecast.facts) if one.settings.get("residency") in (None, "device")
    ]
    chosen_ms = None if chosen is None or chosen.place in WITHOUT_LAYERS else chosen.step_ms
    return [*lines, *split_lines(forecast, on_device, usable_gib, chosen_ms)]


def _export_text(forecast: Forecast, place: Variant) -> str:
    """Return what a stored teacher needs before the run; empty for one that runs."""
    if place not in WITHOUT_LAYERS:
        return ""
    states, topk = stored_bytes(forecast)
    if place is HIDDEN:
        return f", after an export of {size(states * MILLION)} for a million loss tokens"
    return f", after an export of up to {size(topk * MILLION)}, and with another loss"


def stored_bytes(forecast: Forecast) -> tuple[int, int]:
    """Return the bytes of a loss token in exports of all teachers: of hidden states, and at most of top-k."""
    element = 2 if forecast.config.training.bf16 else 4
    teachers = forecast.facts.pair.compared
    return sum(one.shape.hidden_size for one in teachers) * element, len(teachers) * TOPK_BYTES


def separates_peers(forecast: Forecast, machine: int = MACHINE) -> bool:
    """Return True if processes that share a teacher would be on several machines of so many GPUs."""
    return bool(forecast.facts.machine_problems(machine))
