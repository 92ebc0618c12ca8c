"""Check the student, the teachers and the settings of the distillation loss."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from mkd.config.divergence import DECLARATIONS, PARAMETERS, TEACHER_FIELDS
from mkd.config.schema import Config, KDConfig, TeacherConfig
from mkd.errors import UsageError
from mkd.plan.checks.no_effect import no_effect
from mkd.plan.facts import RunFacts


def check_models(facts: RunFacts) -> Iterator[UsageError]:
    """Check that there is a student and, unless kd-ratio is 0, teachers with usable names and weights."""
    config = facts.config
    if not (config.student.hf or config.student.load):
        do = "give --student-hf DIR or --student-load CKPT"
        yield UsageError("no student is given", "there is nothing to train", do, code="model-missing")
    teachers, ratio = config.teachers, config.kd.kd_ratio
    pair_loss = config.pair_loss
    if not config.needs_models or (pair_loss and not pair_loss.needs_reference):  # no teacher is loaded
        return
    if not any(teacher.is_given for teacher in teachers):
        what = f"no teacher is given, but kd-ratio is {ratio}"
        why = "the loss needs the teacher's logits"
        do = "give --teacher-hf DIR, --teacher-load CKPT or --teacher-topk DIR, or train with --kd-ratio 0"
        yield UsageError(what, why, do, code="model-missing")
        return
    for index, teacher in enumerate(teachers):
        if not teacher.is_given:
            what = f"teachers[{index}] names no model"
            why = "every entry is a teacher"
            yield UsageError(what, why, "give its hf or load, or remove it", code="model-missing")
    yield from _without_models(teachers)
    yield from _names(facts.teacher_names)
    yield from _weights(config)


def _without_models(teachers: Sequence[TeacherConfig]) -> Iterator[UsageError]:
    """Yield a problem if a teacher without hidden states is not the only one."""
    places = [
        f"teachers[{index}].{teacher.stand_in}" if index else f"--teacher-{teacher.stand_in}"
        for index, teacher in enumerate(teachers)
        if not teacher.has_head
    ]
    if places and len(teachers) > 1:
        given = f"{' and '.join(places)} {'is' if len(places) == 1 else 'are'} given"
        why = "it takes the place of the only teacher"
        do = "give hf or load instead, or keep one teacher alone"
        yield UsageError(f"{given}, and {len(teachers)} teachers", why, do, code="stored-teacher-excludes")


def _names(names: Sequence[str]) -> Iterator[UsageError]:
    for name, count in Counter(names).items():
        if count > 1:
            what = f"{count} teachers have the name {name}"
            why = "metrics of each teacher carry its name"
            yield UsageError(what, why, "give each teacher another name", code="names-equal")
        if not re.fullmatch(r"[\w.-]+", name):
            what = f"teacher name {name!r} is not a plain word"
            why = "it becomes part of the names of metrics, kd_loss/NAME"
            yield UsageError(what, why, "use letters, digits and . _ -", code="value-not-valid")


def _weights(config: Config) -> Iterator[UsageError]:
    kd, weights = config.kd, [teacher.weight for teacher in config.teachers]
    if len(weights) == 1:
        if weights != [1]:
            why = "a single teacher has the whole weight"
            do = "remove it; --kd-ratio sets the share of distillation in the loss"
            yield UsageError(f"teachers[0].weight is {weights[0]}", why, do, code="remove-flag")
        return
    if not any(weights):
        what = f"the weights of all {len(weights)} teachers are 0"
        why = "weights are divided by their sum"
        yield UsageError(what, why, "give weights above 0", code="out-of-range")
        return
    for index, weight in enumerate(weights):
        if weight <= 0:
            what = f"teachers[{index}].weight {weight} must be above 0"
            why = "a teacher of weight 0 would run for nothing, and one below 0 would be unlearnt"
            do = "give a weight above 0, or remove this teacher"
            yield UsageError(what, why, do, code="out-of-range")
        elif weight != 1 and kd.selects_teacher:
            why = "teacher-combination select takes the best teacher of each pack whole"
            yield no_effect(f"teachers[{index}].weight {weight}", why, "remove it")


def check_objective(facts: RunFacts) -> Iterator[UsageError]:
    """Check that settings of the loss agree with each other and have an effect."""
    config, kd = facts.config, facts.config.kd
    yield from _combination(config)
    if config.pair_loss is None:  # else its kind reports all of them
        yield from _divergences(config)
    if kd.kd_fp32_logits and not config.training.bf16:
        yield no_effect("kd-fp32-logits", "without --bf16 everything is fp32", "remove it")


def _combination(config: Config) -> Iterator[UsageError]:
    """Yield problems of combining several teachers."""
    kd, default = config.kd, KDConfig()
    if kd.teacher_combination != default.teacher_combination and len(config.teachers) < 2:
        setting = f"teacher-combination {kd.teacher_combination}"
        yield no_effect(setting, "there is only one teacher", "remove it")
    if kd.teacher_weighting != default.teacher_weighting:
        setting = f"teacher-weighting {kd.teacher_weighting}"
        if len(config.teachers) < 2:
            yield no_effect(setting, "there is only one teacher", "remove it")
        elif kd.teacher_combination != "weighted_sum":
            why = f"teacher-combination is {kd.teacher_combination}"
            yield no_effect(setting, why, "use --teacher-combination weighted_sum")
    elif kd.teacher_weighting_temperature != default.teacher_weighting_temperature:
        setting = f"teacher-weighting-temperature {kd.teacher_weighting_temperature}"
        has_choice = len(config.teachers) > 1
        why = "teacher-weighting is static" if has_choice else "there is only one teacher"
        yield no_effect(setting, why, "add --teacher-weighting ce" if has_choice else "remove it")
    if not kd.averages_teachers or len(config.teachers) < 2:
        return
    for index, teacher in enumerate(config.teachers):
        for field in ("temperature", *TEACHER_FIELDS):
            if getattr(teacher, field) is not None:
                setting = f"teachers[{index}].{field} {getattr(teacher, field)}"
                why = "teacher-combination average makes one divergence from all teachers"
                yield no_effect(setting, why, f"set kd_{field} in kd:")


def _divergences(config: Config) -> Iterator[UsageError]:
    """Yield divergences that nothing uses, and their unused parameters."""
    kd, default = config.kd, KDConfig()
    used = {_divergence(config, teacher) for teacher in config.teachers} or {kd.kd_divergence}
    if kd.kd_divergence != default.kd_divergence and kd.kd_divergence not in used:
        setting = f"kd-divergence {kd.kd_divergence}"
        yield no_effect(setting, "every teacher has its own divergence, or the xtoken loss uld", "remove it")
    for parameter in PARAMETERS:
        field, name = parameter.name, f"kd_{parameter.name}"
        readers = [one.name for one in DECLARATIONS.values() if one.parameter is parameter]
        inherited, wanted = not config.teachers and kd.kd_divergence in readers, " or ".join(readers)
        for index, teacher in enumerate(config.teachers):
            value, own = getattr(teacher, field), _divergence(config, teacher)
            inherited |= own in readers and value is None
            if value is not None and own not in readers:
                why = f"its divergence is {own}" if own else "its xtoken loss uld is not a divergence"
                yield no_effect(f"teachers[{index}].{field} {value}", why, f"add divergence: {wanted}")
        if getattr(kd, name) != getattr(default, name) and not inherited:
            setting = f"{name.replace('_', '-')} {getattr(kd, name)}"
            is_stored = any(teacher.topk for teacher in config.teachers)  # forward_kl alone
            do = "remove it" if is_stored else f"add --kd-divergence {wanted}"
            yield no_effect(setting, f"only {wanted} reads it", do)


def _divergence(config: Config, teacher: TeacherConfig) -> str | None:
    """Return the divergence to minimise for a teacher; None for uld, a distance of sorted probabilities."""
    if teacher.xtoken is not None and teacher.xtoken.loss == "uld":
        return None
    return teacher.divergence or config.kd.kd_divergence
