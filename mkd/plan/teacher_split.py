"""The search for processes of a teacher's own: how many, and in which layout.

A step takes as long as the slower side. If W_S and W_T are the GPU-milliseconds of a micro-batch on both,
they are equally fast where the teacher has W_T / (W_T + W_S) of the GPUs. Sizes that divide come close.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from mkd.config.schema import Config
from mkd.errors import MkdError
from mkd.plan.checks.model_alone import find_model_problems
from mkd.plan.facts import RunFacts
from mkd.plan.forecast import Forecast
from mkd.plan.layout import nearly_even
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.parallel_sizes import Sizes, partners
from mkd.plan.serving_side import TeacherSide
from mkd.plan.sides import LAYOUT, student_processes
from mkd.plan.times.hardware import LINK_BYTES_PER_MS, MACHINE, NETWORK_BYTES_PER_MS

TENSOR = (1, 2, 4, 8)
PIPELINE = range(1, 17)
EXPERT = (1, 2, 4, 8)
"""Sizes of a teacher's side that are compared."""

MOST_LINKS = 8
"""Replicas of the other side that a replica may talk to: each takes a communicator and its memory."""


@dataclass(frozen=True)
class PlannedSplit:
    """A run with a teacher on processes of its own."""

    student: Forecast  # on its side, with the teacher's head
    teacher: TeacherSide

    @property
    def processes(self) -> int:
        """Processes of both sides."""
        return self.student.facts.world_size + self.teacher.processes

    @property
    def microbatches(self) -> int:
        """Micro-batches of all replicas in a step."""
        return self.student.batch.num_microbatches * self.student.batch.data_parallel

    @property
    def student_ms(self) -> float:
        """Time of a step on the student's side if no state is late."""
        return self.student.student_step_ms()

    @property
    def teacher_ms(self) -> float:
        """Time of a step on the teacher's side if no request is late."""
        return self.student.updates * self.teacher.step_ms(self.microbatches)

    @property
    def link_bytes(self) -> int:
        """Bytes of hidden states that go to the student in a step."""
        microbatches = round(self.teacher.share * self.microbatches)
        return self.student.updates * microbatches * self.teacher.state_bytes()

    @property
    def link_ms(self) -> float:
        """Time to send them, beside the work of both sides."""
        ends = min(self.teacher.sizes.stage, self.student.facts.sizes.stage)
        bandwidth = LINK_BYTES_PER_MS if self.processes <= MACHINE else NETWORK_BYTES_PER_MS
        return self.link_bytes / ends / bandwidth

    @property
    def step_ms(self) -> float:
        """Predicted time of a step."""
        return max(self.student_ms, self.teacher_ms, self.link_ms)

    @property
    def student_wait_ms(self) -> float:
        """Time of a step in which the student waits for states."""
        return self.step_ms - self.student_ms

    @property
    def teacher_idle_share(self) -> float:
        """Proportion (0 to 1) of a step in which the teacher waits for requests."""
        return 1 - self.teacher_ms / self.step_ms

    @property
    def lost_share(self) -> float:
        """Proportion (0 to 1) of all processes' time that one side waits for the other."""
        waits = self.student.facts.world_size * (1 - self.student_ms / self.step_ms)
        return (waits + self.teacher.processes * self.teacher_idle_share) / self.processes

    @property
    def student_gib(self) -> float:
        """Memory of the student's fullest process."""
        return self.student.planned_gib

    @property
    def teacher_gib(self) -> float:
        """Memory of the teacher's fullest process."""
        return self.teacher.need_gib(self.student.facts.sizes.data)

    @property
    def links(self) -> int:
        """Most replicas of the other side that a process exchanges states with."""
        sizes = self.student.facts.sizes.data, self.teacher.sizes.data
        return max(partners(*sizes), partners(*sizes[::-1]))

    @property
    def shares_machine(self) -> bool:
        """True if processes of both sides are on one of several machines."""
        return self.processes > MACHINE and self.student.facts.world_size % MACHINE != 0

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the teacher that make this split, as far as they are not the default."""
        teacher = self.teacher.config.teachers[0]
        sizes = {name: getattr(teacher, name) or 1 for name in LAYOUT}
        found: dict[str, Any] = {"processes": teacher.processes}
        found |= {name: number for name, number in sizes.items() if number > 1}
        return found | ({"pipeline_layout": teacher.pipeline_layout} if teacher.pipeline_layout else {})


def compared_processes(world_size: int) -> range:
    """Return the numbers of a teacher's processes to compare: whole machines, on one or two any number."""
    step = MACHINE if world_size > 2 * MACHINE else 1
    return range(step, world_size, step)


def with_processes(config: Config, processes: int, sizes: Sizes, layers: int) -> Config:
    """Return `config` with the first teacher, of so many layers, on processes of its own.

    Layers that do not divide over the stages are spread nearly evenly.
    """
    teacher, *others = config.teachers
    apart = replace(
        teacher,
        processes=processes,
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        expert_model_parallel_size=sizes.expert,
        pipeline_layout=nearly_even(layers, sizes.pipeline) if layers % sizes.pipeline else None,
    )
    return replace(config, teachers=(apart, *others))


def student_side(facts: RunFacts, config: Config) -> RunFacts:
    """Return the facts of the student without the processes of teachers, whose heads alone are there."""
    parallel = replace(config.parallel, teacher_prefetch="0")
    processes = student_processes(config, facts.world_size)
    heads = (*(one for one in facts.teachers if one is not None), *facts.heads)  # one teacher
    config = replace(config, parallel=parallel)
    return replace(facts, config=config, world_size=processes, teachers=(), heads=heads)


def planned_splits(
    facts: RunFacts,  # of processes that both models share; one teacher runs
    usable_gib: float,
) -> Iterator[PlannedSplit]:
    """Yield the fastest layout that fits for each number of processes, with the student's as it is."""
    (shape,) = facts.teachers
    assert shape is not None, "the shapes of all models are known"
    for number in compared_processes(facts.world_size):
        replicas, rest = divmod(facts.world_size - number, Sizes.of(facts.config.parallel).replica)
        if rest or not replicas:
            continue
        sides = [
            one
            for one in _teacher_sides(facts, number, shape)
            if max(partners(replicas, one.sizes.data), partners(one.sizes.data, replicas)) <= MOST_LINKS
            and one.need_gib(replicas) <= usable_gib
        ]
        for side in sorted(sides, key=lambda one: _preference(one, replicas)):
            try:
                student = Forecast.from_facts(student_side(facts, side.config))
            except MkdError:
                continue
            if student.planned_gib <= usable_gib:
                yield PlannedSplit(student, side)
                break


def _preference(side: TeacherSide, replicas: int) -> tuple[float, int, float]:
    """Sort the fastest first; of equally fast ones that which cuts the model least, then least memory.

    Times are rounded: the last bits of a sum differ between versions of Python, and would decide.
    """
    return round(side.step_ms(1), 3), side.sizes.replica, side.need_gib(replicas)


def _teacher_sides(facts: RunFacts, processes: int, shape: ModelShape) -> Iterator[TeacherSide]:
    """Yield the layouts of the teacher on so many processes that its checks let pass.

    Experts stay within a replica: others would take their micro-batches in step.
    """
    for tensor, stages, expert in product(TENSOR, PIPELINE, EXPERT if shape.moe else (1,)):
        sizes = Sizes(tensor, pipeline=stages, expert=expert)
        if processes % sizes.replica or stages > shape.num_layers or tensor % expert:
            continue
        config = with_processes(facts.config, processes, sizes, shape.num_layers)
        side = TeacherSide.of(replace(facts, config=config), 0, shape)
        if not find_model_problems(side.alone):
            yield side


def best_split(splits: Iterable[PlannedSplit]) -> PlannedSplit | None:
    """Return the split with the shortest step, of equal ones that with least memory; None of nothing."""
    return min(
        splits, key=lambda one: (round(one.step_ms, 3), one.student_gib + one.teacher_gib), default=None
    )
