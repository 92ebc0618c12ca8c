"""Where the teachers' weights can be, in bf16 and in FP8: time and memory of each place, and which to choose.

FP8 changes the teacher a little, so that the best place without it is named, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mkd.config.schema import Config, TeacherConfig
from mkd.errors import MkdError
from mkd.human import milliseconds
from mkd.plan.checks.teacher_peers import check_machine
from mkd.plan.forecast import Forecast
from mkd.plan.times.hardware import MACHINE

PEERS = (2, 4, 8)
"""Numbers of peers that are tried: divisors of a machine."""

QUICKLY_PLANNED = 512
"""Most pipeline ranks x micro-batches at which places are compared with teachers ahead: seconds in all."""

SAME_TIME = 1.001
"""Step times of which the longer is at most so many times the shorter count as equal."""


@dataclass(frozen=True)
class Place:
    """A place of the weights of all teachers."""

    name: str
    settings: Mapping[str, Any]  # of every teacher

    def text(self, is_only: bool) -> str:
        """Return what to write on the command line, or in the file if there are several teachers."""
        given = [(name, value) for name, value in self.settings.items() if value is not None]
        if is_only:
            return " ".join(f"--teacher-{name} {value}" for name, value in given)
        return ", ".join(f"{name}: {value}" for name, value in given) + " for every teacher"

    def apply(self, config: Config) -> Config:
        """Return `config` with every teacher there."""
        return replace(config, teachers=tuple(replace(one, **self.settings) for one in config.teachers))


DEVICE = Place("device", dict(residency="device", peers=None))
SPLIT = tuple(Place(f"{number} peers", dict(residency="peers", peers=number)) for number in PEERS)
HOST = Place("host", dict(residency="host", peers=None))
IN_BF16 = (DEVICE, *SPLIT, HOST)
IN_FP8 = tuple(Place(f"{place.name}, fp8", dict(precision="fp8") | dict(place.settings)) for place in IN_BF16)
RUNNING = (*IN_BF16, *IN_FP8)
"""Places of a teacher that runs, the simplest first."""

STORED = Place("stored", dict(topk="FOLDER"))
"""No teacher runs. An export has to come first, and the loss is another: `choose` takes it last."""


@dataclass(frozen=True)
class PlannedPlace:
    """A place and the forecast of a run with it."""

    place: Place
    step_ms: float
    need_gib: float  # memory of the fullest process
    is_planned: bool = True  # False: `step_ms` is without teachers ahead, though they are


def plan_places(forecast: Forecast) -> list[PlannedPlace]:
    """Return the places that are possible on these GPUs, the simplest first."""
    planned = []
    for place in (*RUNNING, STORED):
        start = forecast.config if place in IN_FP8 else _in_bf16(forecast.config)
        start = _without_teachers(start) if place is STORED else start
        facts = replace(forecast.facts, config=place.apply(start))
        facts = replace(facts, teachers=()) if place is STORED else facts
        try:
            changed = Forecast.from_facts(facts, forecast.gpu_gib)
        except MkdError:
            continue
        if not separates_peers(changed):
            need_gib = max(rank.total_gib for rank in changed.memory().ranks)
            is_planned = not changed.states_ahead or _is_quickly_planned(changed)
            step_ms = changed.planned_step_ms() if is_planned else changed.step_ms()
            planned.append(PlannedPlace(place, step_ms, need_gib, is_planned))
    return planned


def _is_quickly_planned(forecast: Forecast) -> bool:
    return forecast.student_layout.pipeline_parallel * forecast.batch.num_microbatches <= QUICKLY_PLANNED


def _in_bf16(config: Config) -> Config:
    """Return `config` with every teacher in bf16."""
    precision, recipe = TeacherConfig.precision, TeacherConfig.fp8_recipe
    plain = (replace(one, precision=precision, fp8_recipe=recipe) for one in config.teachers)
    return replace(config, teachers=tuple(plain))


def _without_teachers(config: Config) -> Config:
    """Return `config` without the settings that only a running teacher has."""
    return replace(DEVICE.apply(config), parallel=replace(config.parallel, teacher_prefetch="0"))


def choose(planned: Sequence[PlannedPlace], usable_gib: float) -> PlannedPlace | None:
    """Return the place with the shortest step among those that fit, the simplest of equal ones.

    A stored teacher is chosen if nothing else fits. None: nothing fits.
    """
    fitting = [one for one in planned if one.need_gib <= usable_gib]
    running = [one for one in fitting if one.place is not STORED]
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
        exact = choose([one for one in planned if one.place in IN_BF16], usable_gib)
        if chosen.place in IN_FP8:
            line += f"without FP8: {exact.place.text(is_only)}; " if exact else "without FP8 nothing fits; "
        lines = [f"{line}all places{left_out}:"]
    for one in planned:
        line = f"  {one.place.name}: {milliseconds(one.step_ms)}, {one.need_gib:.1f} GiB"
        line += "" if one.need_gib <= usable_gib else ", does not fit"
        lines.append(line + (", after an export, and with another loss" if one.place is STORED else ""))
    return lines


def separates_peers(forecast: Forecast) -> bool:
    """Return True if peers would be on several machines of `MACHINE` GPUs."""
    return any(check_machine(forecast.facts, MACHINE))
