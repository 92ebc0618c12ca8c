"""The fields of a sample in the order of a reader: prompt, texts beside each other, figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PROMPTS = ("prompt", "messages", "conversations", "expected", "answer")
MAX_CHARACTERS = 4000
LONGEST_FIGURE = 40  # characters of a field without a line of its own


@dataclass
class ShownSample:
    """A sample as the page shows it: name -> text."""

    prompts: dict[str, str] = field(default_factory=dict)  # over the whole width
    texts: dict[str, str] = field(default_factory=dict)  # beside each other
    figures: dict[str, str] = field(default_factory=dict)  # in one line


def shown_sample(sample: Mapping[str, Any]) -> ShownSample:
    """Return the fields of a sample, none too long. Texts are those of models, and whatever has many words.

    A field is a figure if it is a number or null, or if it says something short of another one, as
    `student_end` does of `student`.
    """
    shown = ShownSample()
    for key, value in sample.items():
        name, text = str(key), _cut(_readable(value))
        of_another = any(name.startswith(f"{one}_") for one in sample)
        is_figure = value is None or isinstance(value, (bool, int, float))
        if name in PROMPTS:
            shown.prompts[name] = text
        elif is_figure or (of_another and len(text) <= LONGEST_FIGURE):
            shown.figures[name] = text
        else:
            shown.texts[name] = text
    return shown


def _readable(value: Any) -> str:
    """Return a text as it is, a conversation a message a paragraph, and everything else as JSON."""
    if isinstance(value, str):
        return value
    is_messages = isinstance(value, list) and value and all(isinstance(one, dict) for one in value)
    if is_messages and all(isinstance(one.get("content"), str) and "role" in one for one in value):
        return "\n".join(f"{one['role']}: {one['content']}" for one in value)
    return json.dumps(value, ensure_ascii=False)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + " [...]"
