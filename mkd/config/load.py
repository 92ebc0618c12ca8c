"""Read the command line and a YAML file into a `Config`, and record the origin of every value."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mkd.config.flags import parse_command_line
from mkd.config.models import with_initial
from mkd.config.options import FIRST_TEACHER, OF_TEACHERS, all_options, build_config, settings
from mkd.config.packaged import config_path
from mkd.config.schema import Config
from mkd.config.self_teacher import with_self_teacher
from mkd.config.student_base import with_student_base
from mkd.config.yaml_file import FORMER_SECTIONS, YamlFile, read_yaml
from mkd.errors import ErrorList, UsageError, collect_error

DEFAULT = "default"
INDEX = re.compile(r"\[\d+\]")  # of a teacher
WIDEST_VALUE = 48  # columns: a long list of files moves only its own origin to the right


@dataclass(frozen=True)
class LoadedConfig:
    """Settings of a run, and their origins by path (`kd.kd_ratio`): `default`, `FILE.yaml:LINE`, `--flag`."""

    config: Config
    origins: Mapping[str, str]
    words: tuple[str, ...] = ()  # the command line that they were read from


def load_config(argv: Sequence[str]) -> LoadedConfig:
    """Read the command line (without the program's name) and the YAML file it names with --config.

    The command line takes precedence over the file, the file over defaults. Raises one ErrorList with every
    problem.
    """
    command_line = parse_command_line(argv)
    file, errors = YamlFile(""), list(command_line.errors)
    if given_file := command_line.config_file:
        path = collect_error(errors, lambda: config_path(given_file))
        file = file if path is None else read_yaml(str(path))
    errors = file.errors + errors
    given = collect_error(errors, lambda: with_self_teacher(file.values, command_line.values))
    errors += _empty_texts(given or {})
    if errors or given is None:
        raise ErrorList(errors)
    has_teacher = any(path.startswith(FIRST_TEACHER) for path in given)
    values = {path: _at_home(value) for path, (value, _) in given.items()}
    config = build_config(values, max(file.num_teachers, int(has_teacher)))
    config = replace(config, teachers=with_initial(config.student, config.teachers)).with_reference()
    config = with_student_base(config).with_evaluation()
    paths = (option.path for option, _ in settings(config))
    origins = {path: given[path][1] if path in given else DEFAULT for path in paths}
    return LoadedConfig(config, origins, tuple(argv))


def _at_home(value: Any) -> Any:
    """Return a value with the user's home in place of `~/`, which shells leave in files and behind `=`."""
    if isinstance(value, tuple):
        return tuple(map(_at_home, value))
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def _empty_texts(given: Mapping[str, tuple[Any, str]]) -> Iterator[UsageError]:
    """Yield an error for each setting without a default text that is an empty one, such as --load "$UNSET".

    It would count as one that is left out, so that a run starts anew or exports nothing. A prompt
    of a context may be empty.
    """
    options = {option.path: option for option in all_options()}
    for path, (value, origin) in given.items():
        option = options.get(INDEX.sub("[0]", path))
        if value == "" and option and option.optional and ".context." not in path:
            what = f"{origin if origin.startswith('--') else path} is an empty text"
            what += "" if origin.startswith("--") else f" ({origin})"
            do = "give it a value, or leave it out; a shell variable may be unset"
            yield UsageError(what, "it would have no effect", do, code="value-not-valid")


def format_config(loaded: LoadedConfig) -> str:
    """Return one aligned line per setting that was given, for the start of a run: path, value, origin."""
    origins, every = loaded.origins, list(settings(loaded.config))
    rows = [(one.path, _text(value), origins[one.path]) for one, value in every]
    rows = [row for row in rows if row[2] != DEFAULT]
    path_width, value_width = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    value_width = min(value_width, WIDEST_VALUE)
    return "\n".join(f"{path:{path_width}}  {value:{value_width}}  {origin}" for path, value, origin in rows)


def num_defaults(loaded: LoadedConfig) -> int:
    """Return how many settings have their defaults."""
    return sum(origin == DEFAULT for origin in loaded.origins.values())


def save_config(loaded: LoadedConfig, path: str | Path) -> None:
    """Write a YAML file that `--config` reads back to the same `Config`; origins are comments."""
    lines, section = [], ""
    for option, value in settings(loaded.config):
        if option.section != section:
            section = option.section
            lines += _heading(section)
        indent = "  " * _depth(section)
        lines.append(f"{indent}{option.field}: {_text(value)}  # {loaded.origins[option.path]}")
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class SavedSetting:
    """A line of a saved configuration: path (`teachers[0].hf`), value, and origin as in `LoadedConfig`."""

    path: str
    value: Any
    origin: str


def read_saved_config(path: str | Path) -> list[SavedSetting]:
    """Return the settings in a file that `save_config` wrote, also by another version. Skip other lines.

    Settings of former sections have their present paths.
    """
    found, sections, teacher = [], [""], -1
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        depth, text = (len(line) - len(line.lstrip())) // 2, line.strip()
        name, _, rest = text.partition(":")
        if text == "-":
            teacher += 1
            sections = ["", "", f"teachers[{teacher}]."]
        elif not rest:
            sections = [*sections[: depth + 1], f"{sections[depth]}{name}."]
        elif depth < len(sections):
            try:
                value, end = json.JSONDecoder().raw_decode(rest.lstrip())
            except ValueError:
                continue
            origin = rest.lstrip()[end:].removeprefix("  # ")
            found.append(SavedSetting(_present_path(f"{sections[depth]}{name}"), value, origin))
    return found


def _present_path(path: str) -> str:
    """Return the path that a setting of a former section has now."""
    section, _, name = path.partition(".")
    if section not in FORMER_SECTIONS:
        return path
    return next((option.path for option in all_options() if option.field == name), path)


def _depth(section: str) -> int:
    """Return the indentation levels of a section's settings; a teacher is an item of a list."""
    return bool(section) + section.startswith("teachers") + bool(_nested(section))


def _heading(section: str) -> list[str]:
    if name := _nested(section):
        return [f"    {name}:"]
    if not section.startswith("teachers"):
        return [f"{section}:"] if section else []
    return ["teachers:", "  -"] if section == FIRST_TEACHER else ["  -"]


def _nested(section: str) -> str:
    """Return the field of a teacher that the section is; empty if it is another section."""
    teacher, _, name = section.partition(".")
    return name if teacher.startswith("teachers") and name in OF_TEACHERS else ""


def _text(value: Any) -> str:
    """Format a value as JSON, which is YAML too: `null`, `true`, `[\"a\", \"b\"]`, quoted text."""
    return json.dumps(value, ensure_ascii=False)
