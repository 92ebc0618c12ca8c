"""The sides of a run: the student's processes, and those of each teacher on processes of its own.

The processes of a launch are the student's first, then each such teacher's, in the order of their settings.
A side is planned as a run of its own: `RunFacts` of the student's side count its processes only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from mkd.config.schema import Config, ParallelConfig, TeacherConfig
from mkd.errors import UsageError
from mkd.human import counted
from mkd.plan.parallel_sizes import Sizes

LAYOUT = tuple(
    field.name
    for field in fields(ParallelConfig)
    if field.name.endswith("_parallel_size") and field.name in TeacherConfig.__dataclass_fields__
)
"""Settings of a layout that a teacher has for itself, under the names of the student's."""

LEAST_AHEAD = 2
"""Fewest requests ahead of the loss: with one, each side would wait while the other one computes."""


@dataclass(frozen=True)
class Side:
    """Neighbouring processes of a launch that are the student's, or a teacher's."""

    teacher: int | None  # number of the teacher; None: the student's side
    first: int  # rank of its first process in the launch
    size: int

    @property
    def name(self) -> str:
        """Name in the store of the launch."""
        return "student" if self.teacher is None else f"teacher {self.teacher}"


def sides_of(config: Config, world_size: int) -> tuple[Side, ...]:
    """Return the sides of a launch of `world_size` processes, the student's first.

    Raises UsageError if no process is left for the student.
    """
    sides = [Side(None, 0, student_processes(config, world_size))]
    for index, teacher in apart_teachers(config).items():
        sides.append(Side(index, sides[-1].first + sides[-1].size, teacher.processes))
    return tuple(sides)


def apart_teachers(config: Config) -> Mapping[int, TeacherConfig]:
    """Return the teachers on processes of their own, by their numbers."""
    teachers = enumerate(config.teachers if config.needs_models else ())
    return {index: teacher for index, teacher in teachers if teacher.is_apart}


def sent_rows(config: Config, is_last_stage: bool) -> tuple[int, ...]:
    """Return the teachers whose rows a process of the student keeps whole, because it sends them."""
    return tuple(apart_teachers(config)) if is_last_stage else ()


def processes_apart(config: Config) -> int:
    """Return the number of processes that teachers have for themselves."""
    return sum(teacher.processes for teacher in apart_teachers(config).values())


def student_processes(config: Config, world_size: int) -> int:
    """Return how many of `world_size` processes are the student's. Raises UsageError if none are left."""
    apart = processes_apart(config)
    if world_size <= apart:
        what = f"{counted(apart, 'process')} of teachers of {counted(world_size, 'process')}"
        why = "the student, whose processes come first, would have none"
        do = f"start more processes, for example {2 * apart}, or lower --teacher-processes"
        raise UsageError(what, why, do, code="world-not-divisible")
    return world_size - apart


def teacher_layout(teacher: TeacherConfig) -> ParallelConfig:
    """Return the layout of a teacher on processes of its own. Settings of training have their defaults."""
    sizes: dict[str, Any] = {name: getattr(teacher, name) or 1 for name in LAYOUT}
    layout = ParallelConfig(teacher_prefetch="0", **sizes)
    return replace(layout, sequence_parallel=layout.tensor_model_parallel_size > 1)


def teacher_sizes(teacher: TeacherConfig) -> Sizes:
    """Return the sizes of a teacher on processes of its own; `data` are its replicas.

    The processes must be divisible: the checks of its kind report it.
    """
    sizes = Sizes.of(teacher_layout(teacher))
    return replace(sizes, data=teacher.processes // sizes.replica)


def is_layout_whole(teacher: TeacherConfig) -> bool:
    """Return True if the processes of a teacher are whole replicas, which its experts and peers divide.

    If not, its kind reports it once, and its side has no layout to plan.
    """
    sizes = teacher_sizes(teacher)
    return not (teacher.processes % sizes.replica or sizes.row % sizes.expert or uneven_peers(teacher))


def uneven_peers(teacher: TeacherConfig) -> int:
    """Return how many processes would exchange a teacher's layers, if a replica's stage is not a multiple.

    Otherwise 0.
    """
    if teacher.residency != "peers":
        return 0
    sizes = teacher_sizes(teacher)
    peers = sizes.weight_shards * (teacher.peers or 1)
    return peers if sizes.row % peers else 0


def requests_ahead(teacher: TeacherConfig, student_replicas: int) -> int:
    """Return how many micro-batches a replica of the student asks for ahead of its loss.

    By default as many as keep the teacher's pipeline full, with two for every stage and two on their way.
    """
    sizes = teacher_sizes(teacher)
    filling = math.ceil((2 * sizes.pipeline + 2) * sizes.data / student_replicas)
    return teacher.ahead or max(LEAST_AHEAD, filling)


def side_of_teacher(config: Config, index: int) -> Config:
    """Return the configuration in which the teacher of that number runs alone on its processes.

    It is that of `config`, with the teacher's layout in place of the student's.
    """
    teacher, parallel = config.teachers[index], config.parallel
    alone = replace(teacher.without_processes(), expert_model_parallel_size=None)
    layout = replace(
        teacher_layout(teacher),
        distributed_timeout_minutes=parallel.distributed_timeout_minutes,
        distributed_timeout_seconds_after_init=parallel.distributed_timeout_seconds_after_init,
        pipeline_layout="even" if teacher.pipeline_layout else parallel.pipeline_layout,
    )
    others = (*config.teachers[:index], alone, *config.teachers[index + 1 :])
    return replace(config, parallel=layout, teachers=others)


def require_even_row(config: Config, index: int, length: int) -> None:
    """Raise UsageError if processes of a stage cannot share the rows of a teacher evenly.

    A pack of that teacher has `length` tokens, and whole documents.
    """
    teacher, tokens = config.teachers[index], config.training.micro_batch_size * length
    rows = {"student": Sizes.of(config.parallel).row, "teacher": teacher_sizes(teacher).row}
    documents = document_multiple(config)
    multiple = math.lcm(*rows.values(), documents)
    own = f"teachers[{index}].{'context' if teacher.xtoken is None else 'xtoken'}.seq_length"
    given = own if teacher.has_own_row else "--seq-length"
    do = f"use {given} {math.ceil(length / multiple) * multiple}"
    for side, row in rows.items():
        if tokens % row:
            what = f"{tokens} tokens of a row of teachers[{index}] are not a multiple of {row}"
            why = f"{row} processes of the {side}'s stages share it (tensor x context size)"
            raise UsageError(what, why, do, code="length-not-divisible")
    if length % documents:
        what = f"{given} {length} is not a multiple of {documents}"
        why = "context parallelism gives every process of a side two equal parts of each document"
        raise UsageError(what, why, do, code="length-not-divisible")


def document_multiple(config: Config) -> int:
    """Return the number that the length of padded documents is a multiple of, for the rows of all sides."""
    layouts = [config.parallel, *(teacher_layout(one) for one in apart_teachers(config).values())]
    return math.lcm(*(Sizes.of(one).document_multiple for one in layouts))
