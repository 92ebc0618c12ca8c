"""Stored teachers as a kind of run: top-k predictions take the place of a teacher that runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mkd.config.schema import Config, TeacherConfig
from mkd.errors import MkdError, UsageError
from mkd.kinds.kind import Kind, TeacherCard
from mkd.kinds.sampled.rollout_limits import OFF
from mkd.plan.checks.no_effect import no_effect
from mkd.plan.facts import RunFacts

if TYPE_CHECKING:  # they load torch
    from mkd.kinds.stored.topk_setup import TopKSetup
    from mkd.resolve.model_source import ModelSource


class StoredTeachers(Kind):
    """Runs whose teacher is a cache of predictions (`mkd topk`)."""

    def problems(self, facts: RunFacts) -> Iterator[UsageError]:
        """Yield what stored predictions cannot do, each problem once for all such teachers."""
        config = facts.config
        places = ("--teacher-topk", *(f"teachers[{i}].topk" for i in range(1, len(config.teachers))))
        teachers = zip(places, config.teachers, strict=False)
        stored = {place: teacher for place, teacher in teachers if self.teaches(teacher)}
        if stored and config.kd.kd_fp32_logits and config.training.bf16:
            why = "in training only the fused head makes logits of another precision"
            yield no_effect("kd-fp32-logits", why, "remove it")
        if stored and config.rollout.is_on:
            what = "rollouts cannot have a stored teacher"
            why = "its predictions are of stored text, and the student's own text is new in every step"
            yield UsageError(what, why, f"give --teacher-hf, {OFF}", code="rollouts-exclude")
        if stored and config.needs_models:
            yield from _related(stored)
            yield from _divergences(config, stored)

    def teaches(self, teacher: TeacherConfig) -> bool:
        return bool(teacher.topk)

    def teacher_card(self, teacher: TeacherConfig) -> TeacherCard:
        return TeacherCard(
            details=", over its stored ids and the sum of all others",
            without_counterpart="a stored teacher with the rest of its probability is another loss",
        )

    def teacher_setup(
        self, problems: list[MkdError], facts: RunFacts, index: int, source: ModelSource | None
    ) -> TopKSetup | None:
        from mkd.kinds.stored.topk_setup import TopKSetup

        return TopKSetup.find(problems, facts, index, source)


def _related(stored: Mapping[str, TeacherConfig]) -> Iterator[UsageError]:
    """Yield teachers of another tokenizer. `stored`: by place."""
    related = [place for place, teacher in stored.items() if teacher.xtoken is not None]
    if related:
        given = f"{' and '.join(related)} {'is' if len(related) == 1 else 'are'} given"
        what = f"{given} for a teacher with xtoken settings"
        why = "it stores probabilities of the student's tokens, and this teacher has another tokenizer"
        do = "run this teacher from its hf or load, or remove xtoken"
        yield UsageError(what, why, do, code="stored-teacher-excludes")


def _divergences(config: Config, stored: Mapping[str, TeacherConfig]) -> Iterator[UsageError]:
    divergences = {place: teacher.divergence or config.kd.kd_divergence for place, teacher in stored.items()}
    for divergence in dict.fromkeys(one for one in divergences.values() if one != "forward_kl"):
        yield UsageError(
            f"kd-divergence {divergence} cannot be computed from "
            + " and ".join(place for place, one in divergences.items() if one == divergence),
            "of the ids outside the teacher's top-k only their total is stored, which suffices for "
            "forward_kl alone",
            "use --kd-divergence forward_kl, or --teacher-hf instead of --teacher-topk",
            code="stored-teacher-excludes",
        )
