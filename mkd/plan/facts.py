"""The facts of a run: all that follows from its configuration and the shapes of its models, resolved once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Protocol

from mkd.config.models import teacher_names, teacher_roles
from mkd.config.schema import Config, TeacherConfig
from mkd.errors import MkdError
from mkd.plan.auto_layout import auto_layouts
from mkd.plan.batch import BatchPlan
from mkd.plan.layout import Layouts, PipelineLayout, count_virtual_stages
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.placement import TeacherPlace, TeacherPrecision, Variant
from mkd.plan.models.planned_models import PlannedModel, one_layout, planned_models
from mkd.plan.models.planned_teachers import Pair, Teacher, plan_teachers
from mkd.plan.parallel_sizes import Sizes, sizes_of
from mkd.plan.times.cost import DOCUMENT_LENGTH, PairCost, pair_cost
from mkd.plan.work import Work


class RunKind(Protocol):
    """The hooks of a kind of run that a plan calls; `mkd.kinds.kind.Kind` has more."""

    calculates_with: tuple[str, ...]  # options without which it cannot tell its problems
    of_teachers: bool  # True: its settings are of a teacher, also of one that runs alone
    variants: tuple[Variant, ...]  # settings of teachers to compare, the simplest first

    def problems(self, facts: RunFacts) -> Iterable[MkdError]:
        """Yield what is wrong with its settings."""

    def machine_problems(self, facts: RunFacts, processes: int) -> Iterable[MkdError]:
        """Yield what is wrong with its settings if each machine runs so many processes."""

    def work(self, config: Config) -> Work:
        """Return what it adds to times and memory."""

    def place(self, teacher: TeacherConfig) -> TeacherPlace | None:
        """Return the place of a teacher's layers; None from a kind that has no places."""

    def precision(self, teacher: TeacherConfig) -> TeacherPrecision | None:
        """Return the precision of a teacher's layers; None from a kind that has no precisions."""

    def forward_share(self, facts: RunFacts, number: int, teacher: Teacher) -> float:
        """Return the expected share of micro-batches in which the teacher of that number runs."""


@dataclass(frozen=True)
class RunFacts:
    """A configuration on a number of processes, with the shapes of its models as far as they are known.

    Each property is resolved when it is first read. If that fails, every read raises the UsageError again.
    `dataclasses.replace` makes the facts of another configuration.
    """

    config: Config
    world_size: int  # processes
    student: ModelShape | None = None  # None: not known, which is reported elsewhere
    teachers: tuple[ModelShape | None, ...] = ()  # by their numbers; None: not known, or it runs elsewhere
    heads: tuple[ModelShape | None, ...] = ()  # teachers of which only the head is here, in order
    document_length: int = DOCUMENT_LENGTH  # student tokens of a typical document, for the cost of attention
    kinds: tuple[RunKind, ...] = ()  # what else a run can be: see mkd/kinds
    first: int = 0  # rank of the first process in the launch, which may have sides

    @cached_property
    def teacher_names(self) -> tuple[str, ...]:
        """Name of each configured teacher in metrics."""
        return teacher_names(self.config.teachers)

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """Name of each configured teacher in messages."""
        return teacher_roles(self.teacher_names)

    @cached_property
    def running(self) -> Mapping[int, TeacherConfig]:
        """Teachers that run, by their numbers."""
        teachers = enumerate(self.config.teachers if self.config.needs_models else ())
        return {index: teacher for index, teacher in teachers if not teacher.stand_in}

    @property
    def read_teachers(self) -> tuple[int, ...]:
        """Numbers of the teachers that run, whose shapes belong in `teachers`."""
        return tuple(self.running)

    def with_running(self, shapes: Iterable[ModelShape | None]) -> RunFacts:
        """Return the facts with the shapes of `read_teachers`."""
        found = dict(zip(self.read_teachers, shapes, strict=True))
        return replace(
            self, teachers=tuple(found.get(number) for number in range(1 + max(found, default=-1)))
        )

    @property
    def head_numbers(self) -> tuple[int, ...]:
        """Numbers of the teachers whose shapes belong in `heads`: their layers are not in these processes."""
        teachers = enumerate(self.config.teachers if self.config.needs_models else ())
        return tuple(index for index, one in teachers if one.stand_in and one.has_head)

    @property
    def has_only_heads(self) -> bool:
        """True if the logits of all teachers are made of hidden states, in blocks of rows."""
        return all(teacher.has_head for teacher in self.config.teachers)

    @property
    def is_known(self) -> bool:
        """True if the shapes of all models are known."""
        running = (shape for number, shape in enumerate(self.teachers) if number in self.running)
        return None not in (self.student, *running, *self.heads)

    @cached_property
    def models(self) -> tuple[PlannedModel, ...]:
        """The student and the teachers of known shape."""
        return tuple(planned_models(self.config, self.roles, (self.student, *self.teachers)))

    @cached_property
    def virtual_stages(self) -> int:
        """Virtual stages of each pipeline rank; as set if the student's shape is not known."""
        parallel = self.config.parallel
        by_stages = parallel.num_virtual_stages_per_pipeline_rank
        if self.student is None:
            return by_stages or 1
        by_layers = parallel.num_layers_per_virtual_pipeline_stage
        pipeline = parallel.pipeline_model_parallel_size
        return count_virtual_stages(self.student.num_layers, pipeline, by_layers, by_stages)

    @cached_property
    def sizes(self) -> Sizes:
        """Processes along each axis of parallelism."""
        return sizes_of(self.config, self.world_size)

    @cached_property
    def batch(self) -> BatchPlan:
        """Sizes of one optimizer step."""
        return BatchPlan.from_config(self.config, self.world_size)

    @cached_property
    def work(self) -> Work:
        """Additions of the kinds to times and memory."""
        return sum((kind.work(self.config) for kind in self.kinds), start=Work())

    @cached_property
    def planned_teachers(self) -> tuple[Teacher, ...]:
        """Teachers that run, with their settings. All of their shapes must be known."""
        shapes = {number: shape for number, shape in enumerate(self.teachers) if shape is not None}
        missing = self.running.keys() - shapes.keys()
        assert all(number >= len(self.teachers) for number in missing), "the shapes of all teachers are known"
        return self._planned(shapes)

    def share_of(self, number: int, teacher: Teacher) -> float:
        """Return the expected share of micro-batches that need the teacher of that number."""
        return prod(kind.forward_share(self, number, teacher) for kind in self.kinds)

    @cached_property
    def planned_heads(self) -> tuple[Teacher, ...]:
        """Teachers of which only the head is here. All of their shapes must be known."""
        heads = zip(self.head_numbers, self.heads, strict=False)  # none of them may have been read
        shapes = {number: shape for number, shape in heads if shape is not None}
        assert len(shapes) == len(self.heads), "the shapes of all teachers are known"
        return self._planned(shapes)

    def _planned(self, shapes: Mapping[int, ModelShape]) -> tuple[Teacher, ...]:
        if not shapes:
            return ()
        teachers = plan_teachers(self.config, self.roles, shapes, self._place, self._precision)
        return tuple(replace(one, share=self.share_of(one.number, one)) for one in teachers)

    def _place(self, teacher: TeacherConfig) -> TeacherPlace:
        return next(place for kind in self.kinds if (place := kind.place(teacher)) is not None)

    def _precision(self, teacher: TeacherConfig) -> TeacherPrecision:
        return next(one for kind in self.kinds if (one := kind.precision(teacher)) is not None)

    def machine_problems(self, processes: int) -> list[MkdError]:
        """Return what is wrong with this run on machines with so many processes each."""
        return [problem for kind in self.kinds for problem in kind.machine_problems(self, processes)]

    @cached_property
    def pair(self) -> Pair:
        """All models, whose shapes must be known, with what decides the cost of a micro-batch."""
        assert self.student is not None, "the student's shape is known"
        models = self.student, self.planned_teachers, self.planned_heads
        return Pair(self.config, *models, self.document_length, self.work)

    def layout_of(self, model: PlannedModel) -> PipelineLayout:
        """Return the layout of one model, as given or even. Raises UsageError, which names the model."""
        return one_layout(self.config, model, self.virtual_stages)

    @cached_property
    def cost(self) -> PairCost:
        """Cost of a micro-batch if the layers of teachers need no copies."""
        return pair_cost(self.pair, self.config.parallel.pipeline_model_parallel_size * self.virtual_stages)

    @cached_property
    def layouts(self) -> Layouts:
        """Layouts of all models, whose shapes must be known: as given, even or automatic."""
        assert self.is_known, "the shapes of all models are known"
        parallel = self.config.parallel
        if parallel.pipeline_layout == "auto":
            shared = [teacher.place.shares_base for teacher in self.planned_teachers]
            cost = self.cost.with_shared(shared) if any(shared) else self.cost
            found = auto_layouts(cost, parallel.pipeline_model_parallel_size, self.virtual_stages)
            others = iter(found.teachers)
            return Layouts(found.student, tuple(found.student if one else next(others) for one in shared))
        student, *teachers = map(self.layout_of, self.models)
        return Layouts(student, tuple(teachers))
