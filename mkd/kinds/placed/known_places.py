"""All places and precisions of a teacher's decoder layers, and the two kinds of runs that ask them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields

from mkd.config.schema import TeacherConfig
from mkd.errors import MkdError
from mkd.kinds.kind import Kind
from mkd.kinds.placed.choice import Choices
from mkd.kinds.placed.fp8 import Fp8
from mkd.kinds.placed.host_place import HostMemory
from mkd.kinds.placed.peer_place import PeerMemory
from mkd.kinds.placed.place import DeviceMemory, Place
from mkd.kinds.placed.placed_settings import PlaceSettings, PrecisionSettings
from mkd.kinds.placed.precision import Precision
from mkd.kinds.placed.stored_codes import StoredCodes
from mkd.kinds.placed.student_place import StudentMemory
from mkd.plan.checks.ranges import EXPERTS, PACKS, SHARDS, STAGES
from mkd.plan.facts import RunFacts

PLACES: Choices[Place] = Choices(
    "residency", PlaceSettings, (DeviceMemory, PeerMemory, HostMemory, StudentMemory)
)
PRECISIONS: Choices[Precision] = Choices("precision", PrecisionSettings, (Precision, Fp8, StoredCodes))


class Places(Kind):
    """Runs whose teachers have a place."""

    calculates_with = (
        *SHARDS,
        *STAGES,
        *EXPERTS,
        *(f"teacher_{field.name}" for field in fields(PlaceSettings)),
    )
    of_teachers = True
    variants = PLACES.variants

    def problems(self, facts: RunFacts) -> Iterator[MkdError]:
        return PLACES.problems(facts)

    def machine_problems(self, facts: RunFacts, processes: int) -> Iterator[MkdError]:
        for index, place in PLACES.of_running(facts).items():
            yield from place.machine_problems(facts, index, processes)

    def place(self, teacher: TeacherConfig) -> Place:
        return PLACES.of(teacher)


class Precisions(Kind):
    """Runs whose teachers have a precision."""

    calculates_with = (*PACKS, *SHARDS)
    of_teachers = True
    variants = PRECISIONS.variants

    def problems(self, facts: RunFacts) -> Iterator[MkdError]:
        return PRECISIONS.problems(facts)

    def device_problems(self, facts: RunFacts) -> Iterable[MkdError]:
        experts = {model.teacher for model in facts.models if model.shape.moe is not None}
        chosen = ((one, index in experts) for index, one in PRECISIONS.of_running(facts).items())
        found = (problem for one, own in dict.fromkeys(chosen) for problem in one.device_problems(own))
        return {str(problem): problem for problem in found}.values()  # once if several have it

    def precision(self, teacher: TeacherConfig) -> Precision:
        return PRECISIONS.of(teacher)


def rounding(teacher: TeacherConfig, scores: str = "p_t") -> str:
    """Return what its precision changes in the `scores` of a teacher that runs, for the loss card."""
    is_stored = teacher.stand_in and not teacher.is_apart
    return "" if is_stored else PRECISIONS.of(teacher).rounding(scores)
