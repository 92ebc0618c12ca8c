"""The set-up of top-k predictions: their temperature and vocabulary must be those of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mkd.config.schema import Config
from mkd.data.stored.cache_meta import TopKMeta
from mkd.data.stored.teacher_topk import TopKPart
from mkd.errors import DataError, MkdError, UsageError
from mkd.kinds.stored.cache_setup import CacheSetup
from mkd.kinds.stored.stored_term import Stored
from mkd.plan.facts import RunFacts
from mkd.resolve.preflight import Tokenizers

STORED_K = "loss.stored_k"  # among the fingerprints of a run


@dataclass(frozen=True)
class TopKSetup(CacheSetup):
    """Predictions of the most probable ids in the place of a teacher."""

    meta: TopKMeta

    kind_of_meta: ClassVar[type[TopKMeta]] = TopKMeta

    def differences(self, facts: RunFacts) -> Iterator[MkdError]:
        config, folder, meta = facts.config, self.folder, self.meta
        temperature = temperature_of(config)
        if temperature != meta.temperature:
            is_common = config.teachers[0].temperature is None
            setting = "--kd-temperature" if is_common else "teachers[0].temperature"
            name = setting.removeprefix("--")
            what = f"{name} is {temperature}, the teacher cache {folder} is at {meta.temperature}"
            why = (
                "the probability of all ids outside the top-k at another temperature does not follow from it"
            )
            do = f"use {setting} {meta.temperature}, or export again with {setting} {temperature}"
            yield UsageError(what, why, do, code="teacher-cache-temperature-differs")
        yield from super().differences(facts)
        if facts.student is not None and meta.vocab_size > facts.student.vocab_size:
            ids = f"{meta.vocab_size} ids, the student has {facts.student.vocab_size}"
            what = f"the teacher cache {folder} is over {ids}"
            why = "both distributions are compared on the ids that both models have"
            do = "export again with this student's --student-hf"
            yield DataError(what, why, do, code="teacher-cache-differs")

    def fingerprints(self, config: Config, tokenizers: Tokenizers) -> Mapping[str, object]:
        return {STORED_K: self.meta.k, **super().fingerprints(config, tokenizers)}

    def part(self, name: str, is_read: bool) -> TopKPart:
        return TopKPart(self.folder, name, self.meta)

    def term(self, share: float, divergence: Mapping[str, Any]) -> Stored:
        return Stored(self.name, share, self.index, divergence)


def temperature_of(config: Config) -> float:
    """Return the temperature of the first teacher: its own, or the common one."""
    own = config.teachers[0].temperature
    return config.kd.kd_temperature if own is None else own
