"""Check what a run reports: W&B and profiles."""

from __future__ import annotations

from collections.abc import Iterator

from mkd.config.schema import Config, LogConfig
from mkd.errors import UsageError
from mkd.plan.checks.no_effect import no_effect


def check_log(config: Config) -> Iterator[UsageError]:
    """Check that the settings of W&B and of profiling fit each other and have an effect."""
    log, default = config.log, LogConfig()
    if log.wandb_entity and not log.wandb_project:
        yield no_effect(
            f"wandb-entity {log.wandb_entity}", "wandb-project is not given", "add --wandb-project"
        )
    if log.use_pytorch_profiler and not log.profile:
        yield no_effect("use-pytorch-profiler", "nothing is profiled without profile", "add --profile")
    if not (log.profile or log.record_memory_history):
        for name in ("profile_step_start", "profile_step_end", "profile_ranks"):
            if getattr(log, name) != getattr(default, name):
                yield no_effect(
                    name.replace("_", "-"), "nothing is profiled without profile", "add --profile"
                )
        return
    if log.profile_step_end <= log.profile_step_start:
        yield UsageError(
            f"profile-step-end {log.profile_step_end} is not above profile-step-start "
            f"{log.profile_step_start}",
            "the profile covers the steps after profile-step-start, up to profile-step-end",
            f"use --profile-step-end {log.profile_step_start + 2}",
            code="profile-steps-empty",
        )
    elif config.training.train_iters <= log.profile_step_start:
        setting = f"profile-step-start {log.profile_step_start}"
        yield no_effect(setting, f"the run ends at {config.training.train_iters}", "lower it")
    wrong = [rank for rank in log.profile_ranks if not rank.isdigit()]
    if wrong or not log.profile_ranks:
        yield UsageError(
            f"profile-ranks {' '.join(wrong)} are not ranks" if wrong else "profile-ranks is empty",
            "ranks are whole numbers from 0",
            "use for example --profile-ranks 0 1",
            code="profile-ranks-not-valid",
        )
