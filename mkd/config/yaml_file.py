"""The YAML file: same names as the flags, grouped in sections for people; every value remembers its line.

The file is parsed into YAML nodes only, never into Python objects, so that no file can run code. The schema
decides how a scalar's text is read. A key is known by its flag name (`kd_ratio`), in any section or at the
top level, and inside its own section also without the section's name (`ratio`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from mkd.config.megatron_flags import unsupported
from mkd.config.options import OF_TEACHERS, Option, all_options, section_options, section_type, section_types
from mkd.config.other_names import hint
from mkd.config.packaged import shown_path
from mkd.errors import MkdError, UsageError

_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = {_TAG + kind for kind in ("str", "int", "float", "bool", "null", "timestamp", "map", "seq")}
FORMER_SECTIONS = ("feedback",)  # of earlier versions: their keys are now in other sections
# Keys of earlier versions and their defaults, which the config.yaml of every earlier run contains.
FORMER_DEFAULTS: Mapping[str, str] = MappingProxyType(
    {
        "characters_per_sample": "null",
        "lr_warmup_fraction": "null",
        "profile_step_start": "10",
        "profile_step_end": "12",
        "use_pytorch_profiler": "false",
        "exact_token_match_only": "false",
    }
)
NESTED_MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "xtoken": "has another tokenizer than the student",
        "context": "reads another prompt than the student",
        "ema": "averages the student's weights",
    }
)
"""Nested section of a teacher -> what even an empty one says."""
_PAIRS = ("data_tags", "tag_weights")  # lists of NAME=VALUE that may also be written as a mapping
_COMMA_LISTS = ("pipeline_layout", "split")  # texts that may also be written as a YAML list


@dataclass
class YamlFile:
    """Values of a file by path, with their `FILE:LINE`, and all of its errors."""

    path: str
    values: dict[str, tuple[Any, str]] = field(default_factory=dict)  # path -> (value, FILE:LINE)
    num_teachers: int = 0
    errors: list[MkdError] = field(default_factory=list)

    def place(self, node: yaml.Node) -> str:
        """Return FILE:LINE of a node."""
        return f"{shown_path(self.path)}:{node.start_mark.line + 1}"

    def fail(self, node: yaml.Node, error: UsageError) -> None:
        """Add `error`, preceded by the place of `node`."""
        self.errors.append(error.located(self.place(node)))


def read_yaml(path: str) -> YamlFile:
    """Read a configuration file. Never raises: problems are in the result's `errors`."""
    file = YamlFile(path)
    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        what = f"--config {path} cannot be read: {reason}"
        do = "check the path and its encoding"
        file.errors.append(UsageError(what, "", do, code="path-not-found"))
        return file
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else path
        what = f"{place}: not valid YAML: {getattr(error, 'problem', None) or error}"
        file.errors.append(UsageError(what, "", "correct the syntax there", code="yaml-not-valid"))
        return file
    if root is not None:
        _read_section(file, root, "")
    return file


def _read_section(file: YamlFile, node: yaml.Node, section: str) -> None:
    """Read the keys of one section, or of the top level (`""`), which also has the sections."""
    for key, key_node, value in _entries(file, node, section or "the file"):
        if not section and key == "teachers":
            _read_teachers(file, value)
        elif section.startswith("teachers") and key in OF_TEACHERS:
            _read_nested(file, value, f"{section}.{key}", NESTED_MEANINGS[key])
        elif not section and key in (*section_types(), *FORMER_SECTIONS):
            if not _is_null(value):
                _read_section(file, value, key)
        else:
            _read_value(file, key, key_node, value, section)


def _read_teachers(file: YamlFile, node: yaml.Node) -> None:
    if _is_null(node):
        return
    if not isinstance(node, yaml.SequenceNode):
        what = "teachers is not a list"
        why = "every entry describes one teacher"
        file.fail(node, UsageError(what, why, "write `teachers: [{hf: DIR}]`", code="yaml-not-valid"))
        return
    file.num_teachers = len(node.value)
    for index, entry in enumerate(node.value):
        _read_section(file, entry, f"teachers[{index}]")


def _read_nested(file: YamlFile, node: yaml.Node, section: str, meaning: str) -> None:
    """Read a teacher's nested section. Even empty it has a meaning, so its path is among the values."""
    if _is_null(node):
        why = f"it says that this teacher {meaning}"
        do = f"write `{section.rpartition('.')[2]}: {{}}` for its defaults, or remove the line"
        file.fail(node, UsageError(f"{section} has no value", why, do, code="yaml-not-valid"))
        return
    file.values[section] = ({}, file.place(node))
    _read_section(file, node, section)


def _entries(file: YamlFile, node: yaml.Node, name: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Yield (key, its node, value node) of a mapping. Add an error for anything else."""
    if not isinstance(node, yaml.MappingNode):
        why = "settings are written as `name: value`"
        do = "indent them below the section"
        file.fail(node, UsageError(f"{name} is not a mapping", why, do, code="yaml-not-valid"))
        return
    lines: dict[str, int] = {}
    for key_node, value in node.value:
        key = str(key_node.value)
        if key in lines:
            why = f"line {lines[key]} has it already"
            file.fail(
                key_node, UsageError(f"{key} is given twice", why, "keep one of them", code="yaml-not-valid")
            )
            continue
        lines[key] = key_node.start_mark.line + 1
        tag = next((n.tag for n in (node, value) if n.tag not in _PLAIN_TAGS), None)
        if tag is not None:
            what = f"{key} has the tag {tag.replace(_TAG, '!!')}"
            why = "only plain values are read, so that a configuration cannot run code"
            file.fail(value, UsageError(what, why, "remove the tag", code="yaml-not-valid"))
            continue
        yield key, key_node, value


def _read_value(file: YamlFile, key: str, key_node: yaml.Node, node: yaml.Node, section: str) -> None:
    option = _find(key, section)
    if option is None and isinstance(node, yaml.ScalarNode) and FORMER_DEFAULTS.get(key) == node.value:
        return
    if option is None:
        place = file.place(key_node)
        error = unsupported("--" + key.replace("_", "-"), f"{place}: {key}")
        file.errors.append(error or _unknown(place, key, section))
        return
    try:
        value = _parse(option, node, f"{file.place(node)}: {key}")
    except UsageError as error:
        file.errors.append(error)
        return
    earlier, origin = file.values.setdefault(option.path, (value, file.place(node)))
    if earlier != value:
        what = f"{key} is {_shown(value)}, but {origin} says {_shown(earlier)}"
        why = f"both set {option.name}"
        file.fail(key_node, UsageError(what, why, "keep one of them", code="exclude-each-other"))


def _parse(option: Option, node: yaml.Node, label: str) -> Any:
    if _is_null(node):
        if option.optional:
            return None
        if option.kind is tuple:
            return ()
        raise UsageError(f"{label} has no value", "", "give one, or remove the line", code="yaml-not-valid")
    items = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if option.field in _PAIRS and isinstance(node, yaml.MappingNode):
        items = [item for pair in node.value for item in pair]
    if any(not isinstance(item, yaml.ScalarNode) or item.tag not in _PLAIN_TAGS for item in items):
        what = f"{label} is not a plain value"
        raise UsageError(what, f"{option.label}: {option.help}", "write `name: value`", code="yaml-not-valid")
    texts = [item.value for item in items]
    if isinstance(node, yaml.MappingNode):
        texts = [f"{name}={value}" for name, value in zip(texts[::2], texts[1::2], strict=True)]
    if option.kind is not tuple and isinstance(node, yaml.SequenceNode):
        if option.field not in _COMMA_LISTS:
            what = f"{label} is a list"
            raise UsageError(
                what, f"{option.name} has one value", "write `name: value`", code="yaml-not-valid"
            )
        texts = [",".join(texts)]
    return option.parse(texts, label)


def _find(key: str, section: str) -> Option | None:
    """Return the option that `key` means in `section`: first its own settings, then all flag names."""
    for option in _own_options(section):
        if key in (option.field, option.name) or f"{section}_{key}" == option.field:
            return option
    if section.startswith("teachers"):
        return None
    return next((option for option in all_options() if option.name == key), None)


def _own_options(section: str) -> tuple[Option, ...]:
    cls = section_type(section)  # None for the top level and for former sections
    return section_options(cls, section) if cls else ()


def _unknown(place: str, key: str, section: str) -> UsageError:
    names = [option.field for option in _own_options(section)]
    names += [name for name in OF_TEACHERS if section_type(f"{section}.{name}")]
    if not section.startswith("teachers"):
        sections = [] if section else ["teachers", *section_types()]
        names += [*sections, *(option.name for option in all_options())]
    do = hint(key, names, prefix="") or "see --help for all names"
    where = f" in {section}" if section else ""
    return UsageError(
        f"{place}: unknown key {key}{where}", "an unknown setting would be ignored", do, code="key-unknown"
    )


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == _TAG + "null"


def _shown(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)
