"""Teachers with a context as a kind of run: they read another prompt than the student."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mkd.config.models import LIVE
from mkd.config.prompt_template import PROMPT, template_fields
from mkd.config.run_files import rule_for_conversations
from mkd.config.schema import Config, TeacherConfig
from mkd.config.tag_rules import taught_tags
from mkd.data.records.refused_keys import CONTEXTS
from mkd.data.records.wanted import ANY_RECORDS, WantedRecords
from mkd.errors import MkdError, UsageError
from mkd.human import counted
from mkd.kinds.context.context_settings import ContextConfig
from mkd.kinds.context.made_fields import fields_of, made_fields
from mkd.kinds.kind import Kind, TeacherCard
from mkd.plan.checks.no_effect import no_effect
from mkd.plan.facts import RunFacts
from mkd.tokenizers.chat_input import ChatSettings

if TYPE_CHECKING:  # they load torch
    from mkd.kinds.context.context_setup import ContextSetup
    from mkd.resolve.model_source import ModelSource

PROMPT_SETTINGS = ("user", "fallbacks", "system", "chat_template_kwargs", "success")
WHOLE_RULES = ("drop", "truncate")
"""Treatments of long conversations that keep the prompt."""


class Contexts(Kind):
    """Runs with a teacher that reads a prompt of its own."""

    of_teachers = True

    def problems(self, facts: RunFacts) -> Iterator[MkdError]:
        config = facts.config
        found = {i: one.context for i, one in enumerate(config.teachers) if one.context is not None}
        for index, context in found.items():
            yield from _settings(context, f"teachers[{index}].context")
            yield from _excluded(config, index)
        if found and config.needs_models:
            yield from _run(config)
        for index, teacher in enumerate(config.teachers):
            if teacher.weights == LIVE:
                yield from _live(facts, index)

    def records(self, config: Config) -> WantedRecords:
        keys = dict.fromkeys(key for one in config.teachers if one.context for key in _keys(one.context))
        return WantedRecords(context=tuple(keys)) if keys else ANY_RECORDS

    def teaches(self, teacher: TeacherConfig) -> bool:
        return teacher.context is not None and teacher.xtoken is None

    def teacher_card(self, teacher: TeacherConfig) -> TeacherCard:
        return TeacherCard(
            details=context_details(teacher.context),
            normaliser="KD of a teacher with a context by the tokens of last turns and completions",
            without_counterpart="both models must read the same prompt",
        )

    def teacher_setup(
        self, problems: list[MkdError], facts: RunFacts, index: int, source: ModelSource | None
    ) -> ContextSetup:
        from mkd.kinds.context.context_setup import ContextSetup

        config, name = facts.config, facts.teacher_names[index]
        return ContextSetup(config.teachers[index], index, name, source, tags=taught_tags(config, name))


def context_details(context: ContextConfig | None) -> str:
    """Return what the loss card says of a teacher's prompt; empty if it reads the student's.

    Settings are named if they are not the defaults: each changes which tokens have a loss from this teacher,
    or what it reads.
    """
    if context is None:
        return ""
    default = ContextConfig()
    texts = {
        "skip_first": f"without the first {counted(context.skip_first, 'token')} of each completion",
        "missing": "without records that lack its context",
        "success": f"siblings have a reward of at least {context.success:g}",
    }
    found = [f"{texts[name]} ({name})" for name in texts if getattr(context, name) != getattr(default, name)]
    return ", ".join([", after a prompt of the teacher's own (context)", *found])


def _keys(context: ContextConfig) -> list[str]:
    """Return the keys of records that a teacher's prompt may need."""
    fields = [name for text in context.texts for name in fields_of(text)]
    return [*CONTEXTS, *(name for name in fields if name != PROMPT)]


def _settings(context: ContextConfig, path: str) -> Iterator[MkdError]:
    """Yield values that are not valid."""
    named = {"user": context.user, "fallbacks": "".join(context.fallbacks), "system": context.system or ""}
    for name, text in named.items():
        try:
            template_fields(text)
        except ValueError as error:
            what = f"{path}.{name} is not a template: {error}"
            do = "write {prompt}, {KEY} of a record, and {{ and }} for braces"
            yield UsageError(what, "its fields are filled from records", do, code="value-not-valid")
    if context.chat_template_kwargs is not None:
        try:
            ChatSettings.from_flags("auto", context.chat_template_kwargs, None)
        except UsageError as error:
            yield error.located(path)
    if context.skip_first < 0 or (context.seq_length or 1) < 1:
        name = "skip_first" if context.skip_first < 0 else "seq_length"
        what = f"{path}.{name} {getattr(context, name)} is too small"
        yield UsageError(what, "it is a number of tokens", "give a larger one", code="out-of-range")


def _live(facts: RunFacts, index: int) -> Iterator[UsageError]:
    """Yield what a teacher cannot be whose weights are the student's own at every moment."""
    config, teacher = facts.config, facts.config.teachers[index]
    student, parallel = config.student, config.parallel
    wrong = {
        "it names a model": teacher.is_given and (teacher.hf, teacher.load) != (student.hf, student.load),
        "it has no context: both models would predict the same": teacher.context is None,
        "it has a residency, but no weights of its own": teacher.residency != "student",
        "its precision is that of the student": teacher.precision != "bf16",
        "its pipeline layout is that of the student": teacher.pipeline_layout != student.pipeline_layout,
        "its expert parallelism is that of the student": teacher.expert_model_parallel_size is not None,
        "the weights of later steps do not exist yet, but teacher-prefetch is "
        f"{parallel.teacher_prefetch}": parallel.teacher_prefetch != "0",
        "the student computes in FP8": student.precision != "bf16",
        "the student's weights are rounded": config.rounding.rounding is not None,
        "the student's base is rounded": config.lora.is_on and config.lora.lora_base != "bf16",
        "the student has experts": facts.student is not None and facts.student.moe is not None,
        "the student has images": facts.student is not None and facts.student.vision is not None,
    }
    for why in (text for text, is_so in wrong.items() if is_so):
        what = f"teachers[{index}].weights live is not possible"
        yield UsageError(what, why, "remove that, or use weights: frozen", code="value-not-valid")


def _of_agents(config: Config) -> Iterator[UsageError]:
    """Yield settings that records of agents make useless: they have the teacher's prompt as ids."""
    default = ContextConfig()
    for index, teacher in enumerate(config.teachers):
        for name in PROMPT_SETTINGS if teacher.context is not None else ():
            if getattr(teacher.context, name) != getattr(default, name):
                setting = f"teachers[{index}].context.{name}"
                yield no_effect(setting, "records of agents have the prompt as teacher_ids", "remove it")


def _excluded(config: Config, index: int) -> Iterator[UsageError]:
    """Yield what this teacher cannot be besides."""
    teacher, given = config.teachers[index], f"teachers[{index}] has a context"
    if teacher.xtoken is not None and config.rollout.is_on and config.rollout.rollout_source == "records":
        what = f"{given} and xtoken settings, and rollout-source is records"
        why = "records have the teacher's prompt as ids of the student's tokenizer"
        yield UsageError(what, why, "remove one of them", code="exclude-each-other")
    if teacher.stand_in and not teacher.is_apart:  # which is refused with its own reason
        what, why = f"{given}, but it is stored", "its predictions are of the student's prompts"
        do = "run this teacher from its hf or load, or remove the context"
        yield UsageError(what, why, do, code="stored-teacher-excludes")


def _run(config: Config) -> Iterator[UsageError]:
    """Yield what a run with such a teacher cannot be."""
    given = "a teacher has a context"
    if config.kd.averages_teachers and len(config.teachers) > 1:
        what, why = f"teacher-combination average, but {given}", "teachers of an average read the same tokens"
        do = "use --teacher-combination weighted_sum"
        yield UsageError(what, why, do, code="exclude-each-other")
    if config.pair_loss is not None:
        what, why = (
            f"{given}, but {config.pair_loss.flag[2:]} is set",
            "a reference reads the student's prompts",
        )
        yield UsageError(what, why, "remove the context", code="preferences-exclude")
    is_stored = config.data.data_path or config.data.valid_data_path
    if config.rollout.is_on and config.rollout.rollout_source == "records" and not is_stored:
        yield from _of_agents(config)
    made = sorted(made_fields(config))
    if made and not config.grpo.is_on:
        what = f"{given} with {' and '.join(f'{{{one}}}' for one in made)}, but there is no --reward"
        yield UsageError(
            what, "the reward function fills it", "add --reward module:function", code="add-flag"
        )
    rule = rule_for_conversations(config.data.overlong, config.data.overlong_conversations)
    if rule not in WHOLE_RULES:
        what = f"{given}, but overlong-conversations is {rule}"
        why = "a later piece of a conversation has no prompt of the teacher's"
        do = f"use --overlong-conversations {' or '.join(WHOLE_RULES)}"
        yield UsageError(what, why, do, code="exclude-each-other")
