"""Settings of a teacher whose values are classes, so that all about a value is in one file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar

from mkd.config.models import FROZEN
from mkd.config.schema import Config, TeacherConfig
from mkd.errors import MkdError, UsageError
from mkd.plan.checks.no_effect import no_effect
from mkd.plan.facts import RunFacts
from mkd.plan.models.placement import Variant


def flag_of(index: int, setting: str) -> str:
    """Return how messages call a setting of the teacher of that number."""
    return f"teachers[{index}].{setting}" if index else f"--teacher-{setting.replace('_', '-')}"


C = TypeVar("C", bound="Choice")


class Choice:
    """A value of a setting. The fields of its dataclass are other settings of the teacher that it reads."""

    name: ClassVar[str]  # the value
    title: ClassVar[str] = ""  # in texts of a plan, if it changes what a teacher predicts

    @classmethod
    def from_settings(cls: type[C], teacher: TeacherConfig) -> C:
        """Return the choice of a teacher with this value."""
        return cls(**{one: getattr(teacher, one) for one in cls.reads()})

    @classmethod
    def reads(cls) -> tuple[str, ...]:
        """Return the names of the settings that it reads."""
        return tuple(field.name for field in fields(cls))  # type: ignore[arg-type]

    @classmethod
    def compared(cls) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Yield (name, settings that it reads) of what a plan compares. Without a name nothing is written."""
        yield cls.name, {}

    def problems(self, facts: RunFacts, index: int) -> Iterable[MkdError]:
        """Yield what is wrong with the teacher of that number, which runs."""
        return ()


@dataclass(frozen=True)
class Choices(Generic[C]):
    """All values of a setting."""

    setting: str
    section: type  # the dataclass of the setting, and of those that its values read
    known: tuple[type[C], ...]  # the simplest first, which is the default

    def of(self, teacher: TeacherConfig) -> C:
        """Return the choice of a teacher."""
        value = getattr(teacher, self.setting)
        return next(one for one in self.known if one.name == value).from_settings(teacher)

    def of_running(self, facts: RunFacts) -> dict[int, C]:
        """Return the choices of the teachers that run, by their numbers."""
        return {index: self.of(teacher) for index, teacher in facts.running.items()}

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Everything that a plan compares."""
        defaults = {field.name: field.default for field in fields(self.section)}
        return tuple(
            Variant(
                name,
                {self.setting: one.name, **settings} if name else {},
                {key: value for key, value in defaults.items() if key not in one.reads()},
                one.title,
            )
            for one in self.known
            for name, settings in one.compared()
        )

    def problems(self, facts: RunFacts) -> Iterator[MkdError]:
        """Yield what is wrong with the setting, and with those that its values read."""
        yield from self._of_stand_ins(facts.config)
        for index, teacher in facts.running.items():
            yield from self._unread(index, teacher, "" if facts.config.training.bf16 else " --bf16")
        for index, chosen in self.of_running(facts).items():
            yield from chosen.problems(facts, index)

    def _of_stand_ins(self, config: Config) -> Iterator[UsageError]:
        for index, teacher in enumerate(config.teachers if config.needs_models else ()):
            if teacher.stand_in and not teacher.is_apart:
                for name, value in self._given(teacher):
                    setting = f"{flag_of(index, name)} {value}"
                    yield no_effect(setting, "without a model a teacher has no weights", "remove it")

    def _given(self, teacher: TeacherConfig) -> Iterator[tuple[str, object]]:
        """Yield (name, value) of the section's settings that are not the default."""
        for field in fields(self.section):
            value = getattr(teacher, field.name)
            if value != field.default:
                yield field.name, value

    def _unread(self, index: int, teacher: TeacherConfig, in_bf16: str) -> Iterator[UsageError]:
        chosen, flag = self.of(teacher), flag_of(index, self.setting)
        for name, value in self._given(teacher):
            if name not in (self.setting, *chosen.reads()):
                reader = next(one.name for one in self.known if name in one.reads())
                setting = f"{flag_of(index, name)} {value}"
                do = f"add {flag} {reader}{in_bf16 * (reader == 'fp8')}"
                follows = teacher.weights != FROZEN  # its weights are the student's, and stay there
                yield no_effect(setting, f"{flag} is {chosen.name}", "remove it" if follows else do)
