"""Teachers on processes of their own as a kind of run: what they need, and what they exclude."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields

from mkd.config.models import FROZEN
from mkd.config.schema import Config, TeacherConfig
from mkd.errors import MkdError, UsageError, collect_error
from mkd.human import counted
from mkd.kinds.apart.apart_settings import ApartSettings
from mkd.kinds.kind import Kind
from mkd.kinds.placed.choice import flag_of
from mkd.log.metrics import STEP_MEAN, TIME_MEAN, Metric
from mkd.plan.checks.no_effect import no_effect
from mkd.plan.checks.parallel import sequence_problems
from mkd.plan.checks.ranges import SHARDS, STAGES
from mkd.plan.facts import RunFacts
from mkd.plan.sides import LAYOUT, apart_teachers, require_even_row, teacher_sizes, uneven_peers
from mkd.plan.teacher_split import MOST_LINKS

DO_WITHOUT = "remove --teacher-processes"


class TeachersApart(Kind):
    """Runs with a teacher on processes of its own."""

    calculates_with = (*SHARDS, *STAGES, *(f"teacher_{field.name}" for field in fields(ApartSettings)))

    metrics = (
        Metric(
            "teacher_wait_ms",
            "ms",
            STEP_MEAN,
            "time of a step for which the student has nothing to do but wait for states of teachers on "
            "processes of their own, on the process that waits most. Absent without such teachers",
            line=("teacher wait (ms)", ".1f"),
        ),
        Metric(
            "teacher_idle_share",
            "proportion",
            TIME_MEAN,
            "fraction of a step for which teachers on processes of their own have nothing to do. Of a "
            "pipeline, its busiest stage counts. Absent without such teachers, and until the first figures",
            compact=("idle", 5),
            line=("teacher idle", ".3f"),
        ),
    )

    def problems(self, facts: RunFacts) -> Iterator[MkdError]:
        config = facts.config
        for index, teacher in enumerate(config.teachers):
            if not teacher.processes:
                yield from _unread(index, teacher)
            elif not teacher.is_apart:
                what = f"{flag_of(index, 'processes')} {teacher.processes} with {teacher.stand_in}"
                why = "a stored teacher needs no processes"
                yield UsageError(what, why, "remove one of the two", code="stored-teacher-excludes")
        for index, teacher in apart_teachers(config).items():
            yield from _layout(index, teacher)
            yield from _links(facts, index, teacher)
            yield from _excluded(facts, index)
            yield from _uneven(config, index)


def processes_note(teacher: TeacherConfig) -> str:
    """Return where a teacher runs, as the loss card says it; empty if it shares the student's processes."""
    return f", on {counted(teacher.processes, 'process')} of its own" if teacher.is_apart else ""


def _unread(index: int, teacher: TeacherConfig) -> Iterator[UsageError]:
    """Yield settings of a side of its own for a teacher that shares the student's processes."""
    for field in fields(ApartSettings):
        value = getattr(teacher, field.name)
        if value != field.default:
            setting, processes = f"{flag_of(index, field.name)} {value}", flag_of(index, "processes")
            why = "the teacher shares the student's processes, and has its layout"
            is_bound = teacher.stand_in is not None or teacher.weights != FROZEN
            yield no_effect(setting, why, "remove it" if is_bound else f"add {processes} N")


def _layout(index: int, teacher: TeacherConfig) -> Iterator[UsageError]:
    """Yield a layout that does not divide the teacher's processes."""
    sizes, flag = teacher_sizes(teacher), flag_of(index, "processes")
    if teacher.processes % sizes.replica:
        below = teacher.processes // sizes.replica * sizes.replica
        fitting = [str(one) for one in (below, below + sizes.replica) if one]
        what = f"{flag} {teacher.processes} is not a multiple of {sizes.replica}"
        given = [
            f"{getattr(teacher, name)} {name.partition('_')[0]}" for name in LAYOUT if getattr(teacher, name)
        ]
        why = f"a replica of the teacher has {' x '.join(given)} parallel processes"
        yield UsageError(what, why, f"use {flag} {' or '.join(fitting)}", code="world-not-divisible")


def _links(facts: RunFacts, index: int, teacher: TeacherConfig) -> Iterator[UsageError]:
    """Yield numbers of replicas that would connect too many of them."""
    sizes = collect_error([], lambda: facts.sizes)  # `check_batch` reports the error
    own = teacher_sizes(teacher).data
    if sizes is None or not own or teacher.processes % teacher_sizes(teacher).replica:
        return
    common = math.gcd(own, sizes.data)
    most = max(own, sizes.data) // common
    if most > MOST_LINKS:
        what = f"{own} replicas of the teacher and {sizes.data} of the student"
        why = f"a replica would talk to {most} others, with a communicator for each: more than {MOST_LINKS}"
        do = f"change {flag_of(index, 'processes')}, so that one number of replicas divides the other"
        yield UsageError(what, why, do, code="world-not-divisible")


def _uneven(config: Config, index: int) -> list[MkdError]:
    """Return the problem of rows that processes cannot share, if their length is known before the data.

    `check_sequences` reports those that the student's processes cannot split.
    """
    teacher, problems = config.teachers[index], list[MkdError]()
    length = teacher.own_seq_length if teacher.has_own_row else config.training.seq_length
    if length is not None and not any(sequence_problems(config, "", "", length)):
        collect_error(problems, lambda: require_even_row(config, index, length))
    return problems


def _excluded(facts: RunFacts, index: int) -> Iterator[UsageError]:
    """Yield what a run with a teacher on processes of its own cannot be."""
    config, teacher = facts.config, facts.config.teachers[index]
    sizes, given = teacher_sizes(teacher), f"{flag_of(index, 'processes')} {teacher.processes}"
    has_experts_whole = sizes.row % sizes.expert == 0
    peers = uneven_peers(teacher) if has_experts_whole else 0
    shapes = (facts.student, *facts.teachers, *facts.heads)
    earlier = [number for number, one in enumerate(config.teachers[:index]) if one.topk or one.hidden]
    wrong = {
        "the teacher has the student's own weights": (
            teacher.weights != FROZEN or teacher.residency == "student"
        ),
        "a model reads images": any(one is not None and one.vision is not None for one in shapes),
        f"{sizes.expert} processes share its experts, but a replica's stage has {sizes.row}": (
            not has_experts_whole
        ),
        "it is behind a teacher whose hidden states are stored": bool(earlier),
    }
    for why in (text for text, is_so in wrong.items() if is_so):
        do = f"{DO_WITHOUT}: the teacher then shares the student's processes"
        yield UsageError(f"{given} is not possible here", why, do, code="exclude-each-other")
    if peers:
        place = f"{flag_of(index, 'residency')} peers"
        what = f"{place} with {given}: {peers} processes exchange the layers, but a replica's stage has "
        why = "replicas would have to run the same number of rows"
        do = f"remove {place}, or give a replica's stage a multiple of {peers} processes (tensor x context)"
        yield UsageError(f"{what}{sizes.row}", why, do, code="exclude-each-other")
