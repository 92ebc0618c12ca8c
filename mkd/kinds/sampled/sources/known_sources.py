"""The sources of completions by name, and the checks of their settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from mkd.config.schema import Config, RolloutConfig
from mkd.errors import UsageError
from mkd.kinds.sampled.rollout_settings import SOURCES
from mkd.kinds.sampled.sources.text_source import TextSource
from mkd.plan.checks.no_effect import no_effect


def _load(place: str) -> TextSource:
    module, name = place.split(":")
    return getattr(import_module(module), name)()


KNOWN_SOURCES: Mapping[str, TextSource] = {name: _load(place) for name, place in SOURCES.items()}


def source_problems(config: Config) -> Iterator[UsageError]:
    """Yield the problems of the chosen source, and settings that only others read."""
    rollout, default = config.rollout, RolloutConfig()
    chosen = KNOWN_SOURCES[rollout.rollout_source]
    yield from chosen.problems(config)
    readers: dict[str, list[str]] = {}
    for name, source in KNOWN_SOURCES.items():
        for field in source.settings:
            readers.setdefault(field, []).append(name)
    for field, names in readers.items():
        if field not in chosen.settings and getattr(rollout, field) != getattr(default, field):
            why = f"rollout-source is {rollout.rollout_source}"
            do = f"add --rollout-source {' or '.join(names)}"
            unread = KNOWN_SOURCES[names[0]].not_read
            given = [one for one in unread if getattr(rollout, one) != getattr(default, one)]
            if given:
                do += " in place of " + " ".join(f"--{one.replace('_', '-')}" for one in given)
            yield no_effect(field.replace("_", "-"), why, do)
