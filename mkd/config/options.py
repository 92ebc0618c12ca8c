"""The schema as a flat list of options, and the parsing of their values; flags and YAML share both."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from dataclasses import field as declared
from functools import cache
from types import MappingProxyType, NoneType
from typing import Any, get_args, get_type_hints

from mkd.config.field import Range
from mkd.config.schema import Config, TeacherConfig, XTokenConfig
from mkd.errors import UsageError
from mkd.kinds.averaged.ema_settings import EMAConfig
from mkd.kinds.context.context_settings import ContextConfig

FIRST_TEACHER = "teachers[0]"
XTOKEN = ".xtoken"  # after a teacher's section: the section of its cross-tokenizer settings
OF_TEACHERS: Mapping[str, type] = MappingProxyType(
    {"xtoken": XTokenConfig, "context": ContextConfig, "ema": EMAConfig}
)
"""Field of a teacher -> dataclass of its nested section. Even empty it has a meaning."""
_NAME_PREFIXES = {"student": "student_", FIRST_TEACHER: "teacher_"} | {
    f"{FIRST_TEACHER}.{name}": f"{name}_" for name in OF_TEACHERS
}
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_KIND_NAMES = {int: "a whole number", float: "a number", bool: "true or false"}


@dataclass(frozen=True)
class Option:
    """One setting, with its place `path` (`teachers[0].xtoken.loss`) and its flag's `name` (`xtoken_loss`).

    Names are unique except among teachers: settings of later teachers have no flags and share the first one's
    names.
    """

    path: str
    name: str
    kind: type  # int, float, bool, str, or tuple for a list of str
    default: Any
    optional: bool  # None is a valid value
    help: str
    choices: tuple[str, ...] | None
    has_flag: bool
    valid: Range | None = None  # the values that a number may have, if the field says so
    words: Mapping[str, int] = declared(default_factory=dict)  # what may be written in place of a number

    @property
    def section(self) -> str:
        """Part of `path` before the field; empty for root settings."""
        return self.path.rpartition(".")[0]

    @property
    def field(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_negation(self) -> bool:
        """True for a flag such as --no-save, which has no opposite."""
        return self.kind is bool and self.name.startswith("no_")

    @property
    def label(self) -> str:
        """Name in an error: the flag without its dashes, or the path if it can be set in a file only."""
        return self.flag[2:] if self.has_flag else self.path

    @property
    def place(self) -> str:
        """Place to change it: the flag, or the path if it can be set in a file only."""
        return self.flag if self.has_flag else self.path

    def parse(self, texts: list[str], label: str) -> Any:
        """Parse `texts` (one, or several for a list). Raises UsageError whose text starts with `label`."""
        if self.kind is tuple:
            return tuple(texts)
        (text,) = texts
        if self.choices is not None and text not in self.choices:
            what = f"{label}: {text!r} is not a known value"
            raise UsageError(what, "", f"use {' or '.join(self.choices)}", code="value-unknown")
        if text in self.words:
            return self.words[text]
        try:
            value = _READERS[self.kind](text)
            if value in self.words.values():  # it stands for a word
                raise ValueError
            return value
        except (ValueError, KeyError):
            wanted = " or ".join([_KIND_NAMES[self.kind], *self.words])
            what = f"{label}: {text!r} is not {wanted}"
            why = f"{self.label}: {self.help}"
            raise UsageError(what, why, f"give {wanted}", code="value-not-valid") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


_READERS: Mapping[type, Callable[[str], Any]]
_READERS = {int: int, float: _finite, bool: lambda text: _BOOLEANS[text.lower()], str: str}


@cache
def section_options(cls: type, section: str) -> tuple[Option, ...]:
    """Return the options of one section's dataclass, without those of nested sections."""
    hints, documented = get_type_hints(cls), (field for field in fields(cls) if "help" in field.metadata)
    return tuple(_option(field, hints[field.name], section) for field in documented)


def _option(field: Any, hint: Any, section: str) -> Option:
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    is_tuple = hint == tuple[str, ...]
    of_first = _of_first_teacher(section)
    return Option(
        path=f"{section}.{field.name}" if section else field.name,
        name=_NAME_PREFIXES.get(of_first, "") + field.name,
        kind=tuple if is_tuple else kinds[0] if kinds else hint,
        default=field.default,
        optional=NoneType in get_args(hint),
        help=field.metadata["help"],
        choices=field.metadata["choices"],
        has_flag=field.metadata["flag"] and section == of_first,
        valid=field.metadata["valid"],
        words=field.metadata["words"],
    )


def _of_first_teacher(section: str) -> str:
    """Return the first teacher's section of the same kind: `teachers[0].xtoken` for `teachers[3].xtoken`."""
    return re.sub(r"^teachers\[\d+\]", FIRST_TEACHER, section)


@cache
def section_types() -> Mapping[str, type]:
    """Return section -> dataclass in the order of the schema, with the first teacher's sections for all."""
    hints = get_type_hints(Config)
    types: dict[str, type] = {}
    for field in fields(Config):
        assert field.default is not MISSING
        if field.name == "teachers":
            types[FIRST_TEACHER] = TeacherConfig
            types |= {f"{FIRST_TEACHER}.{name}": cls for name, cls in OF_TEACHERS.items()}
        elif not field.metadata:
            types[field.name] = hints[field.name]
    return MappingProxyType(types)


def section_type(section: str) -> type | None:
    """Return the dataclass of a section, also of any teacher's; None if there is no such section."""
    return section_types().get(_of_first_teacher(section))


def all_options() -> list[Option]:
    """Return every option of the schema; teacher options are those of the first teacher."""
    sections = [*section_types().items(), ("", Config)]
    return [option for section, cls in sections for option in section_options(cls, section)]


def settings(config: Config) -> Iterator[tuple[Option, Any]]:
    """Yield every option with its value in `config`, in the order of the schema, root settings last."""
    for section, cls in section_types().items():
        if not section.startswith(FIRST_TEACHER):
            yield from _settings(cls, section, getattr(config, section))
        elif section == FIRST_TEACHER:
            for index, teacher in enumerate(config.teachers):
                yield from _settings(TeacherConfig, f"teachers[{index}]", teacher)
                for name, nested in OF_TEACHERS.items():
                    if (own := getattr(teacher, name)) is not None:
                        yield from _settings(nested, f"teachers[{index}].{name}", own)
    yield from _settings(Config, "", config)


def _settings(cls: type, section: str, values: Any) -> Iterator[tuple[Option, Any]]:
    for option in section_options(cls, section):
        yield option, getattr(values, option.field)


def flat_settings(config: Config) -> dict[str, Any]:
    """Return path -> value of every option."""
    return {option.path: value for option, value in settings(config)}


def build_config(values: Mapping[str, Any], num_teachers: int) -> Config:
    """Build the `Config` with `values` by path, and defaults for everything else.

    A teacher has a nested section if any of its settings, or the path of the section, is among `values`.
    """

    def build(cls: type, section: str, **nested: Any) -> Any:
        options = section_options(cls, section)
        return cls(**{one.field: values[one.path] for one in options if one.path in values}, **nested)

    def teacher(section: str) -> TeacherConfig:
        nested = {
            name: build(cls, f"{section}.{name}")
            for name, cls in OF_TEACHERS.items()
            if any(path == f"{section}.{name}" or path.startswith(f"{section}.{name}.") for path in values)
        }
        return build(TeacherConfig, section, **nested)

    types = section_types().items()
    sections = {name: build(cls, name) for name, cls in types if not name.startswith(FIRST_TEACHER)}
    teachers = tuple(teacher(f"teachers[{index}]") for index in range(num_teachers))
    return build(Config, "", teachers=teachers, **sections)
