"""The chosen settings as a YAML file that `--config` reads, with the reason of each as a comment."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from mkd.config.options import FIRST_TEACHER, XTOKEN, section_types
from mkd.recipe.settings import Settings

WIDTH = 100  # columns of a line
BESIDE = 44  # column of comments that stand beside their setting


def recipe_text(settings: Settings, heading: str) -> str:
    """Return the file: the heading as comments, then a section of settings after another."""
    lines = [f"# {line}".rstrip() for line in heading.splitlines()]
    by_section: dict[str, list[str]] = {}
    for path in settings.choices:
        by_section.setdefault(path.rpartition(".")[0], []).append(path)
    order = [*section_types(), ""]
    for section in sorted(by_section, key=lambda name: order.index(name) if name in order else len(order)):
        lines += ["", *_heading(section, by_section)] if _heading(section, by_section) else []
        for path in by_section[section]:
            choice = settings.choices[path]
            lines += _setting(path.rpartition(".")[2], choice.value, choice.why, _indent(section))
    return "\n".join(lines) + "\n"


def _indent(section: str) -> str:
    return " " * (6 if section.endswith(XTOKEN) else 4 if section == FIRST_TEACHER else 2 if section else 0)


def _heading(section: str, present: dict[str, list[str]]) -> list[str]:
    if section == FIRST_TEACHER:
        return ["teachers:", "  -"]
    if section.endswith(XTOKEN):
        return ["    xtoken:"] if FIRST_TEACHER in present else ["teachers:", "  -", "    xtoken:"]
    return [f"{section}:"] if section else []


def _setting(name: str, value: Any, why: str, indent: str) -> Iterator[str]:
    """Yield a setting with its reason beside it, or above it if that is long."""
    line = f"{indent}{name}: {json.dumps(value, ensure_ascii=False)}"
    beside = f"{line:{BESIDE}}  # {why}"
    if not why or len(beside) <= WIDTH:
        yield beside if why else line
        return
    prefix = f"{indent}# "
    yield from textwrap.wrap(why, WIDTH, initial_indent=prefix, subsequent_indent=prefix)
    yield line
