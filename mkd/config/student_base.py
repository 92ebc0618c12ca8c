"""The student's own initial weights as a teacher."""

from __future__ import annotations

from dataclasses import replace

from mkd.config.models import EMA, LIVE, TeacherConfig
from mkd.config.schema import Config
from mkd.kinds.averaged.ema_settings import EMAConfig

STUDENT_BASE = "student-base"
"""Name of a teacher that is the student as it starts, in place of a folder."""
STUDENT_LIVE = "student-live"
"""Name of a teacher that is the student as it is, unless it has another."""
STUDENT_EMA = "student-ema"
"""Name of a teacher that averages the student's weights, unless it has another."""


def with_student_base(config: Config) -> Config:
    """Return the configuration with the student's model in place of `STUDENT_BASE`.

    The weights of a student with adapters are frozen, so that such a teacher shares them instead of loading
    them again: also a teacher, or a reference, that names the same folder.
    """
    teachers = tuple(_named(config, one) for one in config.teachers)
    parallel = config.parallel
    if parallel.teacher_prefetch == "auto" and any(one.weights in (LIVE, EMA) for one in teachers):
        # The weights of the next step do not exist yet.
        parallel = replace(parallel, teacher_prefetch="0")
    return replace(config, teachers=teachers, parallel=parallel)


def _named(config: Config, teacher: TeacherConfig) -> TeacherConfig:
    student = config.student
    if teacher.weights == LIVE and not teacher.is_given:
        teacher = replace(teacher, hf=student.hf, load=student.load, name=teacher.name or STUDENT_LIVE)
        place = "student" if teacher.residency == "device" else teacher.residency  # another one is refused
        return replace(teacher, residency=place, pipeline_layout=student.pipeline_layout)
    if teacher.weights == EMA:
        return _averaged(config, teacher)
    if teacher.hf == STUDENT_BASE:
        teacher = replace(teacher, hf=student.hf, load=student.load, name=teacher.name or STUDENT_BASE)
    layout, experts = teacher.pipeline_layout, teacher.expert_model_parallel_size
    is_same = (teacher.hf, teacher.load) == (student.hf, student.load) and not teacher.stand_in
    is_plain = (teacher.precision, teacher.xtoken) == ("bf16", None)
    is_plain = is_plain and layout in (None, student.pipeline_layout)
    is_plain = is_plain and experts in (None, config.parallel.expert_model_parallel_size)
    is_shared = config.lora.is_on and config.lora.lora_base == "bf16"
    if is_shared and is_same and is_plain and teacher.residency in ("device", "student"):
        return replace(teacher, residency="student", pipeline_layout=student.pipeline_layout)
    return teacher


def _averaged(config: Config, teacher: TeacherConfig) -> TeacherConfig:
    """Return a teacher whose weights average the student's, with the student's model and layout.

    Frozen weights of a student with adapters are shared.
    """
    student = config.student
    if not teacher.is_given:
        teacher = replace(teacher, hf=student.hf, load=student.load, name=teacher.name or STUDENT_EMA)
    if teacher.pipeline_layout is None:
        teacher = replace(teacher, pipeline_layout=student.pipeline_layout)
    if config.lora.is_on and teacher.residency == "device":
        teacher = replace(teacher, residency="student")
    return replace(teacher, ema=teacher.ema or EMAConfig())
