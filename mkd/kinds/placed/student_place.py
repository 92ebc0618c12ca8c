"""Teachers that are the frozen base of a student with adapters: they take no memory of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mkd.config.models import FROZEN
from mkd.errors import UsageError
from mkd.kinds.placed.choice import flag_of
from mkd.kinds.placed.place import Place
from mkd.plan.facts import RunFacts

if TYPE_CHECKING:  # they load torch
    from mkd.models.language_model import LanguageModel
    from mkd.models.placed.residency import LayerTensors
    from mkd.parallel.context import ParallelContext


@dataclass(frozen=True)
class StudentMemory(Place):
    """The teacher's parameters are those of the student without its adapters, embedding and head included."""

    name = "student"
    streams = False
    shares_base = True

    def device_bytes(self, layers: Sequence[int]) -> int:
        return 0

    def transfer_ms(self, nbytes: int) -> float:
        return 0.0

    def stream(self, parts: Sequence[LanguageModel], context: ParallelContext, tensors: LayerTensors) -> None:
        return None

    def problems(self, facts: RunFacts, index: int) -> Iterator[UsageError]:
        config, teacher = facts.config, facts.config.teachers[index]
        if teacher.weights != FROZEN:  # its kind reports what such a teacher cannot have
            return
        flag, other = f"{flag_of(index, 'residency')} student", "use another residency"
        given = {
            "the student has no adapters, so that all of its weights change": not config.lora.is_on,
            "the student's weights are rounded to NF4": config.lora.lora_base != "bf16",
            "the teacher is not the student's model": (
                (teacher.hf, teacher.load) != (config.student.hf, config.student.load)
            ),
            "the teacher has a tokenizer of its own": teacher.xtoken is not None,
            "the teacher has a precision of its own": teacher.precision != "bf16",
            "the teacher has a pipeline layout of its own": (
                teacher.pipeline_layout not in (None, config.student.pipeline_layout)
            ),
            "the teacher has expert parallelism of its own": (
                teacher.expert_model_parallel_size not in (None, config.parallel.expert_model_parallel_size)
            ),
        }
        for why in (text for text, is_so in given.items() if is_so):
            yield UsageError(f"{flag} is not possible", why, other, code="value-not-valid")
