"""Runs with a teacher whose weights are a moving average of the student's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from mkd.config.models import EMA, FROZEN, LIVE, teacher_names
from mkd.config.schema import Config, TeacherConfig
from mkd.errors import UsageError
from mkd.kinds.averaged.ema_settings import EMAConfig
from mkd.kinds.kind import Kind
from mkd.plan.checks.no_effect import no_effect
from mkd.plan.facts import RunFacts

if TYPE_CHECKING:  # it loads torch
    from mkd.resolve.run_plan import Plan
    from mkd.resolve.teacher_setup import TeacherSetup


class Averages(Kind):
    """Runs with such a teacher."""

    of_teachers = True

    def problems(self, facts: RunFacts) -> Iterator[UsageError]:
        for index, teacher in enumerate(facts.config.teachers):
            if teacher.weights == EMA:
                yield from _averaged(facts, index)
            elif teacher.ema is not None:
                why = f"the weights of this teacher are {teacher.weights}"
                yield no_effect(f"teachers[{index}].ema", why, "add weights: ema")

    def notes(self, plan: Plan) -> Iterable[str]:
        for name, one in zip(plan.teacher_names, plan.config.teachers, strict=False):
            if one.weights == EMA and one.ema is not None:
                parts = f"{_half_life(one.ema)}. {_bytes_text(plan.facts)}"
                yield f"note: {name} averages the student's weights: {parts}"


def _half_life(ema: EMAConfig) -> str:
    """Return how long an average remembers."""
    moves = math.ceil(math.log(2) / -math.log1p(-ema.rate)) if ema.rate < 1 else 1
    updates = moves * ema.every
    return f"after {updates:,} update{'s' * (updates > 1)}, at most half of what it was is left"


def _bytes_text(facts: RunFacts) -> str:
    """Return what an average takes of each process."""
    learned = "learned parameter" if facts.config.lora.is_on else "parameter"
    if not facts.config.training.bf16:
        return f"It takes 4 bytes per {learned}"
    parallel, copies = facts.config.parallel, facts.sizes.copies
    spread = f"/{copies}" if parallel.use_distributed_optimizer and copies > 1 else ""
    return f"It takes 2 bytes per {learned} for its weights, and 4{spread} for the average in fp32"


def weights_text(teacher: TeacherConfig) -> str:
    """Return what the loss card says about the weights of a teacher that follows the student."""
    if teacher.weights == LIVE:
        return "; its weights are the student's at every moment, without a gradient"
    if teacher.weights != EMA or teacher.ema is None:
        return ""
    rate, every = teacher.ema.rate, teacher.ema.every
    updates = "update" if every == 1 else f"{every} updates"
    return f"; its weights are q <- {1 - rate:g} q + {rate:g} x the student's after every {updates}"


def changing_teachers(config: Config) -> frozenset[str]:
    """Return the names of the teachers whose weights change while the student learns."""
    pairs = zip(teacher_names(config.teachers), config.teachers, strict=True)
    return frozenset(name for name, one in pairs if follows_student(one))


def averaging_teachers(setups: Iterable[TeacherSetup]) -> list[str]:
    """Return the names of the teachers of a run whose weights average the student's."""
    return [one.name for one in setups if one.settings.weights == EMA]


def follows_student(teacher: TeacherConfig) -> bool:
    """Return True if the weights of a teacher change while the student learns."""
    return teacher.weights != FROZEN


def _averaged(facts: RunFacts, index: int) -> Iterator[UsageError]:
    """Yield what a teacher cannot be whose weights average the student's."""
    config, teacher = facts.config, facts.config.teachers[index]
    student, parallel = config.student, config.parallel
    place = "student" if config.lora.is_on else "device"
    rate = config.training.moe_router_bias_update_rate
    wrong = {
        "it names a model": (teacher.hf, teacher.load) != (student.hf, student.load) or teacher.stand_in,
        "it has a tokenizer of its own": teacher.xtoken is not None,
        f"its weights change, and its residency is {teacher.residency}": teacher.residency != place,
        "its weights change, and its precision is fp8": teacher.precision != "bf16",
        "its pipeline layout is that of the student": teacher.pipeline_layout != student.pipeline_layout,
        "its expert parallelism is that of the student": (
            teacher.expert_model_parallel_size not in (None, parallel.expert_model_parallel_size)
        ),
        "the weights of later steps do not exist yet, but teacher-prefetch is "
        f"{parallel.teacher_prefetch}": parallel.teacher_prefetch != "0",
        "averages of a student that computes in FP8 have not been tried": student.precision != "bf16",
        "averages of rounded weights have not been tried": config.rounding.rounding is not None,
        "the student's base is rounded": config.lora.is_on and config.lora.lora_base != "bf16",
        f"moe-router-bias-update-rate {rate:g} moves biases outside of updates": rate != 0,
        "averages of a student with images have not been tried": (
            facts.student is not None and facts.student.vision is not None
        ),
    }
    for why in (text for text, is_so in wrong.items() if is_so):
        what = f"teachers[{index}].weights ema is not possible"
        yield UsageError(what, why, "remove that, or use weights: frozen", code="value-not-valid")
