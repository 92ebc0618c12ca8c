"""All kinds of runs, and their additions together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from importlib import import_module
from operator import or_
from typing import TYPE_CHECKING

from mkd.config.models import TEACHER_KINDS
from mkd.config.schema import Config, TeacherConfig
from mkd.data.records.wanted import WantedRecords
from mkd.errors import MkdError
from mkd.kinds.apart.teachers_apart import TeachersApart, processes_note
from mkd.kinds.averaged.averaged_teachers import Averages
from mkd.kinds.fp8_students.fp8_students import Fp8Students
from mkd.kinds.judged.grpo import GRPO
from mkd.kinds.judged.preferences import Pairs
from mkd.kinds.kind import CardTerm, Kind, TeacherCard
from mkd.kinds.lora.lora_students import LoRAStudents
from mkd.kinds.placed.known_places import Places, Precisions
from mkd.kinds.rounded.rounded_student import RoundedStudent
from mkd.kinds.routed.tagged_records import Routed
from mkd.kinds.sampled.own_text import OwnText
from mkd.kinds.weighted.weighted import Weighted
from mkd.log.metrics import CORE_METRICS, Registry
from mkd.plan.facts import RunFacts

if TYPE_CHECKING:  # they load torch
    from mkd.resolve.model_source import ModelSource
    from mkd.resolve.teacher_setup import TeacherSetup
    from mkd.train.teachers.base import DataTerm


def _teacher_kinds() -> Iterator[Kind]:
    for place in TEACHER_KINDS.values():
        module, name = place.split(":")
        yield getattr(import_module(module), name)()


KINDS: tuple[Kind, ...] = (
    *_teacher_kinds(),
    Pairs(),
    GRPO(),
    Weighted(),
    Routed(),
    OwnText(),
    LoRAStudents(),
    Averages(),
    Precisions(),
    Places(),
    TeachersApart(),
    RoundedStudent(),
    Fp8Students(),
)
METRICS = Registry((*CORE_METRICS, *(metric for kind in KINDS for metric in kind.metrics)))


def identity(config: Config) -> dict[str, object]:
    """Return the settings of all kinds that must not change when a run resumes."""
    return {name: value for kind in KINDS for name, value in kind.identity(config).items()}


def wanted_records(config: Config) -> WantedRecords:
    """Return what the loss reads of records besides their texts."""
    return reduce(or_, (kind.records(config) for kind in KINDS))


def device_problems(facts: RunFacts) -> list[MkdError]:
    """Return what the devices of this machine cannot compute of a run. It may load torch."""
    return [problem for kind in KINDS for problem in kind.device_problems(facts)]


def card_term(config: Config) -> CardTerm | None:
    """Return the loss that takes the place of the cross entropy, as the loss card shows it."""
    return next((term for kind in KINDS if (term := kind.card(config)) is not None), None)


def data_term(config: Config, scored_ids: int) -> DataTerm | None:
    """Return the loss that takes the place of the cross entropy; None if the run has that. See `Kind`."""
    found = (kind.data_term(config, scored_ids) for kind in KINDS)
    return next((term for term in found if term is not None), None)


def _teacher_kind(teacher: TeacherConfig) -> Kind | None:
    """Return the kind of a teacher; None: it runs and reads the student's tokens."""
    return next((kind for kind in KINDS if kind.teaches(teacher)), None)


def teacher_card(teacher: TeacherConfig) -> TeacherCard:
    """Return how the loss card shows a teacher."""
    kind = _teacher_kind(teacher)
    card = TeacherCard() if kind is None else kind.teacher_card(teacher)
    return replace(card, details=card.details + processes_note(teacher))


def teacher_setup(
    problems: list[MkdError], facts: RunFacts, index: int, source: ModelSource | None
) -> TeacherSetup | None:
    """Return the set-up of the teacher of that number; None after adding an error to `problems`."""
    from mkd.resolve.teacher_setup import TeacherSetup

    settings = facts.config.teachers[index]
    kind = _teacher_kind(settings)
    if kind is None:
        return TeacherSetup(settings, index, facts.teacher_names[index], source)
    return kind.teacher_setup(problems, facts, index, source)
