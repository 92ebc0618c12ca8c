"""Text of a run before its first step: only what was set, and what it is about to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mkd.config.load import LoadedConfig, format_config, num_defaults

if TYPE_CHECKING:  # they load torch
    from mkd.platform import Platform
    from mkd.resolve.run_plan import Plan


def start_text(loaded: LoadedConfig, plan: Plan, platform: Platform, folder: Path) -> str:
    """Return the start of a run that logs to `folder`: a few lines, and where the rest is."""
    from mkd.run.plan_text import brief, objective

    loss = objective(plan).splitlines()[1].split(maxsplit=1)[1]
    lines = [
        *given_settings(loaded, f"listed in {folder / 'config.yaml'}"),
        brief(plan, predicts=platform.is_cuda),
        f"loss: {loss}; its formula is in {folder / 'loss_card.txt'}",
        platform.describe(),
    ]
    return "\n".join(lines)


def dry_run_text(loaded: LoadedConfig, plan: Plan, platform: Platform) -> str:
    """Return everything that is known before the start."""
    from mkd.run.dry_run import verdict_text
    from mkd.run.plan_text import objective, plan_text

    given = given_settings(loaded, "described by `mkd train --help-all`")
    return "\n".join([*given, plan_text(plan), objective(plan), platform.describe(), verdict_text(plan)])


def given_settings(loaded: LoadedConfig, where: str) -> list[str]:
    """Return the settings that were given, and a line about the others."""
    return [format_config(loaded), f"{num_defaults(loaded)} other settings have their defaults, {where}"]
