"""Texts with fields, `{prompt}` and `{KEY}`, that records fill."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter

PROMPT = "prompt"
"""Field of the text that the student reads as its last user message or prompt."""

FEEDBACK, SIBLING = "feedback", "sibling"
"""Fields that a step of sampling fills: what the reward function says about a completion, and the best other
completion of its prompt."""
MADE = (FEEDBACK, SIBLING)


def template_fields(text: str) -> tuple[str, ...]:
    """Return the fields of a text, each once. Raises ValueError if it is not a template."""
    found = []
    for _, name, style, conversion in Formatter().parse(text):
        if name is None:
            continue
        if style or conversion or not name or not name.strip() or set(name) & set(".[]"):
            raise ValueError(f"{{{name}}} is not the name of a key")
        found.append(name)
    return tuple(dict.fromkeys(found))


def fill(text: str, values: Mapping[str, str]) -> str:
    """Return the text with the values of all of its fields."""
    parts = []
    for literal, name, _, _ in Formatter().parse(text):
        parts += [literal] if name is None else [literal, values[name]]
    return "".join(parts)
