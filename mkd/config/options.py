"""The schema as a flat list of options, and the reading of their values from text: shared by flags and YAML."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from types import NoneType
from typing import Any, get_args, get_type_hints

from mkd.config.schema import Config, TeacherConfig
from mkd.errors import UsageError

FIRST_TEACHER = "teachers[0]"
_NAME_PREFIXES = {"student": "student_", FIRST_TEACHER: "teacher_"}
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_KIND_NAMES = {int: "a whole number", float: "a number", bool: "true or false"}


@dataclass(frozen=True)
class Option:
    """One setting. `path` (`kd.kd_ratio`, `teachers[0].hf`) says where it lives, `name` (`teacher_hf`) is unique."""

    path: str
    name: str
    kind: type  # int, float, bool, str, or tuple for a list of str
    default: Any
    optional: bool  # None is a value
    help: str
    choices: tuple[str, ...] | None
    has_flag: bool

    @property
    def section(self) -> str:
        """The part of `path` before the field; empty for settings of the root."""
        return self.path.rpartition(".")[0]

    @property
    def field(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def parse(self, texts: list[str], label: str) -> Any:
        """The value that `texts` (one, or several for a list) spell. Raises UsageError that starts with `label`."""
        if self.kind is tuple:
            return tuple(texts)
        (text,) = texts
        if self.choices is not None and text not in self.choices:
            raise UsageError(f"{label}: {text!r} is not a known value", "", f"use {_one_of(self.choices)}")
        try:
            return _READERS[self.kind](text)
        except (ValueError, KeyError):
            wanted = _KIND_NAMES[self.kind]
            raise UsageError(
                f"{label}: {text!r} is not {wanted}", f"{self.name} is {self.help}", f"give {wanted}"
            ) from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


_READERS = {int: int, float: _finite, bool: lambda text: _BOOLEANS[text.lower()], str: str}


def _one_of(values: Iterable[str]) -> str:
    return " or ".join(values)


def section_options(cls: type, section: str) -> list[Option]:
    """The options of one section's dataclass."""
    hints = get_type_hints(cls)
    return [_option(field, hints[field.name], section) for field in fields(cls) if "help" in field.metadata]


def _option(field: Any, hint: Any, section: str) -> Option:
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    is_tuple = hint == tuple[str, ...]
    return Option(
        path=f"{section}.{field.name}" if section else field.name,
        name=_NAME_PREFIXES.get(section, "") + field.name,
        kind=tuple if is_tuple else kinds[0] if kinds else hint,
        default=field.default,
        optional=NoneType in get_args(hint),
        help=field.metadata["help"],
        choices=field.metadata["choices"],
        has_flag=field.metadata["flag"],
    )


def section_types() -> dict[str, type]:
    """Section -> its dataclass, in the order of the schema; the teachers' section is that of the first one."""
    hints = get_type_hints(Config)
    types = {}
    for field in fields(Config):
        assert field.default is not MISSING
        if field.name == "teachers":
            types[FIRST_TEACHER] = TeacherConfig
        elif not field.metadata:
            types[field.name] = hints[field.name]
    return types


def all_options() -> list[Option]:
    """Every option of the schema; teacher options are those of the first teacher."""
    nested = [section_options(cls, section) for section, cls in section_types().items()]
    return [option for options in nested for option in options] + section_options(Config, "")


def build_config(values: Mapping[str, Any], num_teachers: int) -> Config:
    """The `Config` with `values` by path, and defaults for everything else."""

    def build(cls: type, section: str) -> Any:
        given = {option.field: values[option.path] for option in section_options(cls, section) if option.path in values}
        return cls(**given)

    sections = {name: build(cls, name) for name, cls in section_types().items() if name != FIRST_TEACHER}
    teachers = tuple(build(TeacherConfig, f"teachers[{index}]") for index in range(num_teachers))
    root = {option.field: values[option.path] for option in section_options(Config, "") if option.path in values}
    return Config(teachers=teachers, **sections, **root)
