"""The text about teachers on processes of their own: those of a run, and the best ones for another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from mkd.errors import collect_error
from mkd.human import counted, milliseconds, size
from mkd.plan.advice.cuda_graphs import served_graphs
from mkd.plan.facts import RunFacts
from mkd.plan.forecast import Forecast
from mkd.plan.models.placement import Variant
from mkd.plan.parallel_sizes import Sizes
from mkd.plan.serving_side import TeacherSide
from mkd.plan.teacher_split import PlannedSplit, best_split, planned_splits
from mkd.plan.times.hardware import MACHINE

BETTER = 0.97
"""Step time over that of shared processes, up to which a split is recommended: the plan is not more exact."""

LOSS = 0.05
"""Share of all processes' time that is lost by waiting, from which a note says so."""


def describe_sides(forecast: Forecast, usable_gib: float | None = None) -> Iterator[str]:
    """Yield a line for each teacher of a run that has processes of its own."""
    replicas = forecast.facts.sizes.data
    for side in forecast.sides:
        split, role = PlannedSplit(forecast, side), forecast.facts.roles[side.number]
        need_gib = split.teacher_gib
        fits = "" if usable_gib is None or need_gib <= usable_gib else ", does not fit"
        yield (
            f"{role}: {counted(side.processes, 'process')} of its own ({layout_text(side.sizes)}), asked "
            f"{side.ahead(replicas)} micro-batches ahead{_asked(side)}: "
            f"{milliseconds(split.teacher_ms)} a step, {need_gib:.1f} GiB{fits}; "
            f"the student's side takes {milliseconds(split.student_ms)}; {_waits(split)}; "
            f"{served_graphs(side, replicas, usable_gib).describe()}"
        )


def split_lines(
    forecast: Forecast, variants: list[Variant], usable_gib: float, chosen_ms: float | None
) -> Iterator[str]:
    """Yield the best split of the processes for each of the `variants` of the only teacher, if one fits.

    With settings where it is faster than shared processes, which take `chosen_ms` at best (None: too much).
    """
    if len(forecast.config.teachers) != 1 or forecast.teachers[0].shape.vision is not None:
        return
    for variant in variants:
        facts = replace(forecast.facts, config=variant.apply(forecast.config))
        best = collect_error([], partial(_best, facts, usable_gib))
        if best is None:
            continue
        _, _, precision = variant.name.partition(", ")
        line = (
            f"  {best.student.facts.world_size} student + {best.teacher.processes} teacher processes"
            f"{precision and ', ' + precision} ({layout_text(best.teacher.sizes)}): "
            f"{milliseconds(best.step_ms)}, {best.student_gib:.1f} + {best.teacher_gib:.1f} GiB, "
            f"{_waits(best)}"
        )
        if chosen_ms is None or best.step_ms <= BETTER * chosen_ms:
            flags = {**variant.settings, **best.settings}
            line += "; with " + " ".join(
                f"--teacher-{name.replace('_', '-')} {value}"
                for name, value in flags.items()
                if name != "residency"
            )
        yield line


def _best(facts: RunFacts, usable_gib: float) -> PlannedSplit | None:
    return best_split(planned_splits(facts, usable_gib))


def side_notes(forecast: Forecast) -> Iterator[str]:
    """Yield what makes teachers on processes of their own slow."""
    for side in forecast.sides:
        split, role = PlannedSplit(forecast, side), forecast.facts.roles[side.number]
        if split.shares_machine:
            yield (
                f"note: processes of the student and of {role} share a machine of {MACHINE}: whole machines "
                "for each side keep its collectives off the network"
            )
        if forecast.facts.work.slots:
            yield (
                f"note: the processes of {role} wait while the student samples, which predicted times leave "
                "out. A teacher that shares the student's processes leaves none idle then"
            )
        if split.lost_share > LOSS:
            yield (
                f"note: in this split one side waits for the other in {split.lost_share:.3f} of all "
                "processes' time. mkd plan --device-memory-gib N without --teacher-processes compares others"
            )


def _asked(side: TeacherSide) -> str:
    return f", in {side.share:.3g} of them" if side.share < 1 else ""


def _waits(split: PlannedSplit) -> str:
    second = split.link_bytes / split.step_ms * 1000
    return (
        f"the student waits {milliseconds(split.student_wait_ms)} a step, the teacher "
        f"{split.teacher_idle_share:.3f} of it, {size(round(second))} of hidden states a second"
    )


def layout_text(sizes: Sizes) -> str:
    """Return sizes above 1 as text: `pipeline 8, 4 replicas`."""
    parts = [f"{name} {number}" for name, number in vars(sizes).items() if number > 1 and name != "data"]
    return ", ".join([*parts, counted(sizes.data, "replica")])
