"""The settings of a first run, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mkd.config.options import build_config
from mkd.config.schema import Config

GIVEN = "as given"


@dataclass(frozen=True)
class Choice:
    """A value, and why it was chosen."""

    value: Any
    why: str = ""


@dataclass
class Settings:
    """Settings by their path (`training.seq_length`): first those that the user gave, which stay."""

    given: Mapping[str, tuple[Any, str]] = field(default_factory=dict)  # path -> (value, flag)
    choices: dict[str, Choice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.choices |= {path: Choice(value, GIVEN) for path, (value, _) in self.given.items()}

    def put(self, path: str, value: Any, why: str = "") -> Any:
        """Choose a value, unless the user gave one. Return the value that counts."""
        if path not in self.given:
            self.choices[path] = Choice(value, why)
        return self.choices[path].value

    def get(self, path: str) -> Any:
        """Return the value of a setting that has been chosen or given."""
        return self.choices[path].value

    def config(self) -> Config:
        """Return the configuration of a run with these settings."""
        return build_config({path: choice.value for path, choice in self.choices.items()}, 1)
