"""The problems of running one model of a configuration alone, for an evaluation or an export."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from mkd.config.schema import Config, KDConfig, StudentConfig, TeacherConfig
from mkd.errors import MkdError, UsageError, collect_error
from mkd.plan.checks.expert_limits import check_expert_settings, check_experts
from mkd.plan.checks.parallel import check_ffn, check_heads, check_parallel, check_sequences
from mkd.plan.checks.ranges import EXPERTS, PACKS, SHARDS, STAGES, check_ranges, options_out_of_range
from mkd.plan.checks.vision_limits import first_part_problems
from mkd.plan.facts import RunFacts, RunKind
from mkd.plan.layout import PipelineLayout
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.planned_models import PlannedModel, one_layout
from mkd.plan.parallel_sizes import Sizes, model_sizes

READ_BY_A_MODEL = (
    *SHARDS,
    *STAGES,
    "seq_length",
    "micro_batch_size",
    "seed",
    "num_workers",
    "max_bad_records",
    "max_image_pixels",
    "max_image_side",
    "max_patches_per_pack",
    "kd_temperature",
    "teacher_temperature",
    "distributed_timeout_minutes",
    *EXPERTS,
)
"""Numbers that matter to a model that runs alone, beside those of kinds of teachers."""


@dataclass(frozen=True)
class ModelAlone:
    """The student or a teacher of a configuration, which runs alone. Training settings are ignored."""

    config: Config
    world_size: int  # processes
    shape: ModelShape | None = None  # None: it could not be read, which has been reported
    teacher: int | None = None  # number of the teacher that runs; None: the student runs
    kinds: tuple[RunKind, ...] = ()
    first: int = 0  # rank of its first process in the launch

    @cached_property
    def facts(self) -> RunFacts:
        """Facts of the configuration with the shape of this model alone."""
        if self.teacher is None:
            return self._in_place_of_student
        return self._facts(self.config, None, (None,) * self.teacher + (self.shape,))

    @cached_property
    def of_teacher(self) -> RunFacts:
        """Facts of the configuration with this teacher only, in which it runs."""
        assert self.teacher is not None, "it is a teacher"
        running = replace(self.config.teachers[self.teacher].as_model(), tags=())
        data = replace(self.config.data, data_tags=())  # tags choose among several teachers
        alone = replace(self.config, teachers=(running,), kd=KDConfig(), data=data)
        return self._facts(alone, None, (self.shape,))

    @cached_property
    def _in_place_of_student(self) -> RunFacts:
        return self._facts(self.config, self.shape)

    def _facts(
        self, config: Config, student: ModelShape | None, teachers: tuple[ModelShape | None, ...] = ()
    ) -> RunFacts:
        return RunFacts(config, self.world_size, student, teachers, kinds=self.kinds, first=self.first)

    @property
    def is_side(self) -> bool:
        """True if it has processes of its own in a launch, of which the student's are the first."""
        return self.first > 0

    @property
    def settings(self) -> StudentConfig | TeacherConfig:
        """Settings of the model."""
        return self.config.student if self.teacher is None else self.config.teachers[self.teacher]

    @property
    def role(self) -> str:
        """Name of the model in messages."""
        return "student" if self.teacher is None else self.facts.roles[self.teacher]

    @property
    def planned(self) -> PlannedModel:
        """The model with its settings of layouts. Its shape must be known."""
        (planned,) = self.facts.models
        return planned

    @property
    def sizes(self) -> Sizes:
        """Processes along each axis. Its shape must be known."""
        return model_sizes(self.config, self.planned.shape, self.teacher)

    @property
    def virtual_stages(self) -> int:
        """Virtual stages of each pipeline rank. Raises UsageError as `RunFacts.virtual_stages`."""
        return self._in_place_of_student.virtual_stages

    @cached_property
    def layout(self) -> PipelineLayout:
        """Layout of the model. Raises UsageError if there is none."""
        if self.config.parallel.pipeline_layout == "auto":
            return self._in_place_of_student.layouts.student
        return one_layout(self.config, self.planned, self.virtual_stages)


def find_model_problems(model: ModelAlone) -> list[MkdError]:
    """Return the problems of running one model alone."""
    facts, teacher = model.facts, model.teacher
    kinds = [kind for kind in model.kinds if kind.of_teachers]
    read = {*READ_BY_A_MODEL, *(name for kind in kinds for name in kind.calculates_with)}
    wrong = options_out_of_range(facts) & read
    problems: list[MkdError] = [*check_ranges(facts, read)]
    if not (model.settings.hf or model.settings.load):
        role = "student" if teacher is None else "teacher"
        do = f"give --{role}-hf DIR or --{role}-load CKPT"
        missing = UsageError(f"no {role} is given", "it is the model that runs", do, code="model-missing")
        problems.append(missing)
    problems += [*check_parallel(facts), *check_expert_settings(facts)]
    # The checks of the launch look at lengths of packs, which fit the layouts of all sides.
    if not model.is_side and wrong.isdisjoint((*PACKS, *SHARDS)):
        problems += check_sequences(facts)
    if wrong.isdisjoint((*SHARDS, *STAGES)):
        collect_error(problems, lambda: facts.sizes)
    for kind in kinds if teacher is not None else ():
        if wrong.isdisjoint(kind.calculates_with):
            problems += kind.problems(model.of_teacher)
    if model.shape is None:
        return problems
    if "tensor_model_parallel_size" not in wrong:
        problems += check_ffn(facts)
    if wrong.isdisjoint(SHARDS):
        problems += check_heads(facts)
    if wrong.isdisjoint((*SHARDS, *STAGES, *EXPERTS)):
        problems += check_experts(facts)
    if wrong.isdisjoint(STAGES):
        stages = collect_error(problems, lambda: model.virtual_stages)
        if stages is not None and not problems:
            layout = collect_error(problems, lambda: model.layout)
            if layout is not None:
                problems += first_part_problems(model.planned, layout)
    return problems
