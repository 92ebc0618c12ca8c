"""The hooks of a kind of run. Each adds nothing unless a kind has its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mkd.config.schema import Config, TeacherConfig
from mkd.data.records.wanted import WantedRecords
from mkd.errors import MkdError
from mkd.log.metrics import Metric
from mkd.plan.facts import RunFacts
from mkd.plan.models.placement import TeacherPlace, TeacherPrecision, Variant
from mkd.plan.models.planned_teachers import Teacher
from mkd.plan.work import Work

if TYPE_CHECKING:  # they load torch
    from mkd.resolve.model_source import ModelSource
    from mkd.resolve.preflight import Tokenizers
    from mkd.resolve.run_plan import Plan
    from mkd.resolve.teacher_setup import TeacherSetup
    from mkd.train.teachers.base import DataTerm

Row = tuple[str, str]  # of the loss card: label, text
NOTHING: Mapping[str, object] = {}


@dataclass(frozen=True)
class CardTerm:
    """A loss that takes the place of the cross entropy, as the loss card shows it."""

    name: str  # in the formula
    rows: tuple[Row, ...]  # the formula
    unit: str = "token"  # the loss is a mean over these
    mask: str | None = None  # tokens that count; None: those of the text
    normaliser: str | None = None  # None: the loss tokens of the global batch
    elsewhere: tuple[Row, ...] = ()  # the same loss in other engines
    without_counterpart: str | None = None  # why no other engine has it together with a divergence


@dataclass(frozen=True)
class TeacherCard:
    """A teacher as the loss card shows it."""

    divergence: str = "{}"  # with the formula of the divergence in place of the braces
    details: str = ""  # follows the temperature
    vocabulary: str = ""  # follows the numbers of rows; empty: both models have the same tokens
    normaliser: str = ""  # follows the one of the other losses
    without_counterpart: str | None = None  # why no other engine has this loss


class Kind:
    """A feature that changes what a run learns from, or where its teachers are.

    A plan asks all hooks but `device_problems`, and those from `teacher_setup` on, without torch.
    """

    metrics: tuple[Metric, ...] = ()  # of its records, with their places in the lines of the terminal
    calculates_with: tuple[str, ...] = ()  # options without which it cannot tell its problems
    of_teachers: bool = False  # True: its settings are of a teacher, also of one that runs alone
    variants: tuple[Variant, ...] = ()  # settings of teachers that a plan compares, the simplest first

    def problems(self, facts: RunFacts) -> Iterable[MkdError]:
        """Yield what is wrong with its settings; also those that nothing reads because the kind is off."""
        return ()

    def machine_problems(self, facts: RunFacts, processes: int) -> Iterable[MkdError]:
        """Yield what is wrong with its settings if each machine runs so many processes."""
        return ()

    def device_problems(self, facts: RunFacts) -> Iterable[MkdError]:
        """Yield what the devices of this machine cannot compute. It may load torch."""
        return ()

    def work(self, config: Config) -> Work:
        """Return what the kind adds to times and memory."""
        return Work()

    def place(self, teacher: TeacherConfig) -> TeacherPlace | None:
        """Return the place of a teacher's layers; None from a kind that has no places."""
        return None

    def precision(self, teacher: TeacherConfig) -> TeacherPrecision | None:
        """Return the precision of a teacher's layers; None from a kind that has no precisions."""
        return None

    def forward_share(self, facts: RunFacts, number: int, teacher: Teacher) -> float:
        """Return the expected share of micro-batches in which the teacher of that number runs."""
        return 1.0

    def card(self, config: Config) -> CardTerm | None:
        """Return the loss that takes the place of the cross entropy; None if the kind has none."""
        return None

    def text_rows(self, config: Config) -> Iterable[Row]:
        """Yield rows of the loss card about the text that has a loss, or about the student."""
        return ()

    def student_rows(self, config: Config) -> Iterable[Row]:
        """Yield rows of the loss card about the weights of the student that learn."""
        return ()

    def records(self, config: Config) -> WantedRecords:
        """Return what the loss reads of records besides their texts."""
        return WantedRecords()

    def identity(self, config: Config) -> Mapping[str, object]:
        """Return the settings, by name, that must not change when a run resumes."""
        return NOTHING

    def teaches(self, teacher: TeacherConfig) -> bool:
        """Return True if the teacher is of this kind."""
        return False

    def teacher_card(self, teacher: TeacherConfig) -> TeacherCard:
        """Return how the loss card shows a teacher of this kind."""
        return TeacherCard()

    def teacher_setup(
        self, problems: list[MkdError], facts: RunFacts, index: int, source: ModelSource | None
    ) -> TeacherSetup | None:
        """Return the set-up of a teacher of this kind; None after adding an error to `problems`.

        `source`: its model, if it names one.
        """
        raise NotImplementedError

    def file_problems(
        self,
        facts: RunFacts,
        tokenizers: Tokenizers | None,
        student: ModelSource | None,
        teachers: Sequence[ModelSource | None],
    ) -> Iterable[MkdError]:
        """Yield what is wrong with its files. None: a problem that is reported elsewhere.

        `teachers`: those that run, here or on processes of their own.
        """
        return ()

    def notes(self, plan: Plan) -> Iterable[str]:
        """Yield what the user should know before the start, a line each."""
        return ()

    def data_term(self, config: Config, scored_ids: int) -> DataTerm | None:
        """Return the loss that takes the place of the cross entropy; None if the kind has none.

        `scored_ids`: number of ids that the sampler's probabilities are over.
        """
        return None
