"""The place of a teacher with --teacher-processes auto: on processes of its own, or beside the student."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mkd.config.models import APART, CHOSEN_WITH_PROCESSES, FROZEN, PRECISION, TeacherConfig
from mkd.config.schema import Config
from mkd.config.student_base import with_student_base
from mkd.errors import UsageError, collect_error
from mkd.human import counted, milliseconds
from mkd.plan.advice.own_processes import BETTER, layout_text
from mkd.plan.advice.teacher_place import choose, plan_places, running_variants
from mkd.plan.facts import RunFacts
from mkd.plan.forecast import Forecast
from mkd.plan.models.placement import Variant
from mkd.plan.teacher_split import PlannedSplit, best_split, planned_splits
from mkd.plan.times.hardware import MACHINE

FLAG = "--teacher-processes auto"
NO_SPLIT = "no split of the processes is possible, or none fits"
DO_WITHOUT = "give --teacher-processes N"


@dataclass(frozen=True)
class ChosenPlace:
    """Settings that the plan chose for the only teacher."""

    settings: Mapping[str, Any]  # of `CHOSEN_WITH_PROCESSES`; the others have their defaults
    text: str  # a line: what, and against what

    def apply(self, config: Config) -> Config:
        """Return the settings of the run with this place."""
        (teacher,) = config.teachers
        # A teacher that is the student's frozen base shares its weights, unless it has processes of its own.
        return with_student_base(replace(config, teachers=(teacher.placed(**self.settings),)))


def is_open(config: Config) -> bool:
    """Return True if the plan has to choose the place of a teacher."""
    return any(teacher.place_is_open for teacher in config.teachers)


def open_problems(config: Config) -> Iterator[UsageError]:
    """Yield why a plan cannot choose, whatever the memory."""
    if len(config.teachers) > 1:
        why = "a plan compares splits of the processes between a student and one teacher"
        do = "give every teacher its processes: N"
        yield UsageError(f"{FLAG} with {len(config.teachers)} teachers", why, do, code="exclude-each-other")
        return
    (teacher,) = config.teachers
    excluded = _excluded(config, teacher)
    if excluded is not None:
        yield UsageError(f"{FLAG} is not possible here", excluded, DO_WITHOUT, code="exclude-each-other")
        return
    for name in CHOSEN_WITH_PROCESSES:
        value = getattr(teacher, name)
        if name != APART and value != getattr(teacher.placed(), name):
            what = f"{FLAG} with --teacher-{name.replace('_', '-')} {value}"
            why = "it chooses the place and the layout of the teacher"
            yield UsageError(what, why, f"remove it, or {DO_WITHOUT}", code="exclude-each-other")
    why = ""
    if not config.needs_models:
        why = "no teacher is read"
    elif teacher.topk or teacher.hidden:
        why = "a stored teacher needs no processes"
    if why:
        yield UsageError(f"{FLAG} would have no effect", why, "remove it", code="remove-flag")
        return
    if config.training.global_batch_size is None:
        what = f"{FLAG} without --global-batch-size"
        why = "the batch would follow from the number of processes that are left for the student"
        yield UsageError(what, why, f"give --global-batch-size, or {DO_WITHOUT}", code="add-flag")


def _excluded(config: Config, teacher: TeacherConfig) -> str | None:
    """Return why neither a split nor its comparison with shared processes makes sense; None: it does."""
    if teacher.weights != FROZEN:
        return "the teacher has the student's own weights, which no other process has"
    if config.parallel.teacher_prefetch not in ("auto", "0"):
        return f"--teacher-prefetch {config.parallel.teacher_prefetch} needs a teacher on shared processes"
    return None


def memory_unknown() -> UsageError:
    what, why = f"{FLAG}, but the memory of a GPU is not known", "a place must fit there"
    do = f"add --device-memory-gib N, the memory of a GPU of the run, or {DO_WITHOUT}"
    return UsageError(what, why, do, code="add-flag")


def choose_place(facts: RunFacts, usable_gib: float, machine: int = MACHINE) -> ChosenPlace:
    """Choose the fastest place in the teacher's precision, a split of the processes only if it is 3 % faster.

    `facts` are of all processes, with the shapes of both models. `machine`: processes of a machine. If
    nothing is known to fit, it is the simplest place. Raises ErrorList if no place is possible, and
    UsageError if the run samples its text.
    """
    facts = replace(facts, config=ChosenPlace({}, "").apply(facts.config))
    if facts.work.slots:
        why = "the plan leaves out the time of sampling, in which a teacher on its own processes would wait"
        raise UsageError(f"{FLAG} is not possible here", why, DO_WITHOUT, code="exclude-each-other")
    variants = [one for one in running_variants(facts) if _has_precision(one, facts.config)]
    shared = choose(plan_places(Forecast(facts), variants, machine), usable_gib)
    split = _best_split(facts, usable_gib)
    if split is None:
        if shared is None:
            Forecast.from_facts(facts)  # raises what is wrong with the run on shared processes
            return ChosenPlace({}, f"{FLAG}: 0, no place of the teacher fits {usable_gib:.1f} GiB")
        return ChosenPlace(_own_settings(shared.place), f"{FLAG}: 0, {NO_SPLIT}")
    own = (
        f"{counted(split.teacher.processes, 'process')} ({layout_text(split.teacher.sizes)}), "
        f"{milliseconds(split.step_ms)} a step"
    )
    if shared is None:
        return ChosenPlace(split.settings, f"{FLAG}: {own}; nothing else is possible and fits")
    beside = f"on shared processes ({shared.place.name}) {milliseconds(shared.step_ms)}"
    if split.step_ms <= BETTER * shared.step_ms:
        return ChosenPlace(split.settings, f"{FLAG}: {own}; {beside}")
    return ChosenPlace(_own_settings(shared.place), f"{FLAG}: 0, {beside}; {own}")


def _has_precision(place: Variant, config: Config) -> bool:
    (now,), (then,) = config.teachers, place.apply(config).teachers
    return all(getattr(now, name) == getattr(then, name) for name in PRECISION)


def _own_settings(place: Variant) -> dict[str, Any]:
    return {name: value for name, value in place.settings.items() if name in CHOSEN_WITH_PROCESSES}


def _best_split(facts: RunFacts, usable_gib: float) -> PlannedSplit | None:
    shape = facts.teachers[0]
    if facts.world_size == 1 or shape is None or shape.vision is not None:
        return None
    found = collect_error([], partial(_splits, facts, usable_gib))
    return best_split(found or [])


def _splits(facts: RunFacts, usable_gib: float) -> list[PlannedSplit]:
    return list(planned_splits(facts, usable_gib))
