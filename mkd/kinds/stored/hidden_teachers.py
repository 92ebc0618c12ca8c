"""Stored hidden states as a kind of run: they take the place of a teacher's layers, not of its head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mkd.config.schema import TeacherConfig
from mkd.errors import MkdError, UsageError
from mkd.kinds.kind import Kind, TeacherCard
from mkd.kinds.sampled.rollout_limits import OFF
from mkd.plan.facts import RunFacts

if TYPE_CHECKING:  # they load torch
    from mkd.kinds.stored.hidden_setup import HiddenSetup
    from mkd.resolve.model_source import ModelSource


class HiddenTeachers(Kind):
    """Runs that read a teacher's final hidden states from a cache (`mkd hidden`)."""

    def problems(self, facts: RunFacts) -> Iterator[UsageError]:
        """Yield what stored hidden states cannot do."""
        config = facts.config
        numbers = [index for index, one in enumerate(config.teachers) if one.hidden]
        if numbers and config.rollout.is_on:
            what = "rollouts cannot have a stored teacher"
            why = "its hidden states are of stored text, and the student's own text is new in every step"
            yield UsageError(what, why, f"give --teacher-hf, {OFF}", code="rollouts-exclude")
        if not config.needs_models:
            return
        for number in numbers:
            teacher = config.teachers[number]
            place = f"teachers[{number}].hidden" if number else "--teacher-hidden"
            if teacher.topk:
                what = f"{place} is given for a teacher with topk"
                why = "one of them takes the place of the teacher"
                yield UsageError(what, why, "remove one of the two", code="stored-teacher-excludes")
            if teacher.xtoken is not None:
                what = f"{place} is given for a teacher with xtoken settings"
                why = "the states are of the student's tokens, and this teacher has another tokenizer"
                do = "run this teacher from its hf or load, or remove xtoken"
                yield UsageError(what, why, do, code="stored-teacher-excludes")
            later = [one for one in facts.running if one > number]
            if later:
                what = f"{place} is in front of teachers[{later[0]}], which runs"
                why = "teachers with stored hidden states follow those that run"
                do = "list the teachers that run first"
                yield UsageError(what, why, do, code="stored-teacher-excludes")

    def teaches(self, teacher: TeacherConfig) -> bool:
        return teacher.stand_in == "hidden"

    def teacher_card(self, teacher: TeacherConfig) -> TeacherCard:
        return TeacherCard(details=", from its stored hidden states")

    def teacher_setup(
        self, problems: list[MkdError], facts: RunFacts, index: int, source: ModelSource | None
    ) -> HiddenSetup | None:
        from mkd.kinds.stored.hidden_setup import HiddenSetup

        return HiddenSetup.find(problems, facts, index, source)
