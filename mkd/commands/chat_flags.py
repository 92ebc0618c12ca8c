"""Flags of commands that read conversations as training does: from the options of a run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields

from mkd.config.data_files import is_raw
from mkd.config.run_files import DataConfig
from mkd.plan.checks.no_effect import no_effect
from mkd.tokenizers.chat_input import ChatSettings

TEMPLATE_NAMES = ("chat_template_kwargs", "chat_date")
NAMES = ("chat_loss", *TEMPLATE_NAMES)


def add_chat_flags(add: Callable[..., object], names: Sequence[str] = NAMES) -> None:
    """Add the flags with `add`, the `add_argument` of a parser."""
    documented = {field.name: field for field in fields(DataConfig)}
    for name in names:
        option = documented[name]
        known = option.metadata
        text = known["help"] + (f" (default: {option.default})" if option.default else "")
        text = text.replace("the run's first start, also after it resumes", "the start")
        add("--" + name.replace("_", "-"), default=option.default, choices=known["choices"], help=text)


def add_template_flags(add: Callable[..., object]) -> None:
    """Add the flags that decide what a chat template writes, without those of losses."""
    add_chat_flags(add, TEMPLATE_NAMES)


def require_records(args: argparse.Namespace, path: str) -> None:
    """Raise UsageError if a flag is set for the prefix of a corpus, whose conversations are tokenised."""
    defaults = {field.name: field.default for field in fields(DataConfig)}
    for name in NAMES:
        if getattr(args, name) != defaults[name] and not is_raw(path):
            why = f"{path} is tokenised, with the settings that `mkd preprocess` had"
            raise no_effect(f"--{name.replace('_', '-')}", why, "remove it")


def chat_of(args: argparse.Namespace) -> ChatSettings:
    """Return the settings of the flags, with today's date unless they name one. Raises UsageError."""
    return ChatSettings.from_flags(*(getattr(args, name) for name in NAMES)).dated()
