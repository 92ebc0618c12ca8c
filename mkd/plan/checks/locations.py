"""Check the settings of what a run reads and writes: data, tasks, checkpoints, reports.

The code that reads files checks that they exist.
"""

from __future__ import annotations

from collections.abc import Iterator

from mkd.config.not_paths import why_no_path
from mkd.config.options import settings
from mkd.config.schema import Config, LogConfig
from mkd.config.split import EXAMPLE_SPLIT, parse_split
from mkd.errors import MkdError, UsageError, collect_error
from mkd.plan.checks.no_effect import no_effect
from mkd.plan.facts import RunFacts

WRITTEN = ("save", "export_hf", "export_lora", "log_dir", "tensorboard_dir", "data_cache_path")
"""Fields of settings that are folders, which need not exist."""
_NEED_SAVE = ("save", "save_interval", "save_retain_interval", "keep_checkpoints", "async_save")
_NEED_PROFILE = ("profile_steps", "profile_ranks")


def check_places(facts: RunFacts) -> Iterator[UsageError]:
    """Check that what is written, and the folder to resume from, would not become a folder named `$HOME`."""
    for option, value in settings(facts.config):
        found = why_no_path(value) if option.field in WRITTEN and isinstance(value, str) else None
        if found is not None:
            what = f"{option.place} {value} is not a path"
            yield UsageError(what, *found, code="value-not-valid")


def check_data(facts: RunFacts) -> Iterator[MkdError]:
    """Check that there is training data, and held-out data if evaluations are due."""
    config, data, training = facts.config, facts.config.data, facts.config.training
    if not data.data_path and config.rollout.on_policy_fraction < 1:
        yield UsageError("no training data is given", "", "give --data-path PATH", code="data-path-missing")
    problems: list[MkdError] = []
    split = collect_error(problems, lambda: parse_split(data.split))
    yield from problems
    if split is None or not training.evaluates:
        return
    of_split = split.validation and data.data_path
    if not (data.valid_data_path or of_split or _eval_tasks(config)):
        what = f"eval-interval {training.eval_interval} has no held-out data"
        why = f"split {data.split} leaves none for validation, and there is no valid-data-path"
        do = f"give --valid-data-path PATH, or --split {EXAMPLE_SPLIT}"
        yield UsageError(what, why, do, code="data-path-missing")


def check_tasks(facts: RunFacts) -> Iterator[UsageError]:
    """Check that something runs the held-out tasks and reads their settings."""
    config = facts.config
    if _eval_tasks(config) and not config.training.eval_interval:
        given = [name for name in ("eval_multiple_choice", "eval_completions") if getattr(config.data, name)]
        setting = " and ".join(given).replace("_", "-")
        yield no_effect(setting, "nothing is evaluated without eval-interval", "add --eval-interval N")
    if config.data.eval_num_fewshot and not config.data.eval_multiple_choice:
        setting = f"eval-num-fewshot {config.data.eval_num_fewshot}"
        why = "only multiple-choice questions have examples before them"
        due = "" if config.training.eval_interval else " --eval-interval N"
        yield no_effect(setting, why, f"add --eval-multiple-choice FILE{due}")


def check_folders(facts: RunFacts) -> Iterator[UsageError]:
    """Check that the run saves and loads where other settings rely on it."""
    config, checkpoint = facts.config, facts.config.checkpoint
    for name in _NEED_SAVE:
        value = getattr(checkpoint, name)
        if value and checkpoint.no_save:
            what = f"{name.replace('_', '-')} {value} contradicts no-save"
            yield UsageError(
                what, "the run writes no checkpoints", "leave out one of them", code="exclude-each-other"
            )
    if checkpoint.accept_change and not checkpoint.load:
        why = "a run is compared only with the checkpoint that it resumes from"
        yield no_effect("accept-change", why, "add --load DIR")
    if checkpoint.ckpt_step is not None and not (checkpoint.load or config.student.load):
        what = f"ckpt-step {checkpoint.ckpt_step} has no folder"
        yield UsageError(what, "", "give --load DIR", code="add-flag")


def check_log(facts: RunFacts) -> Iterator[UsageError]:
    """Check that the settings of W&B and of profiling fit each other and have an effect."""
    log, default = facts.config.log, LogConfig()
    if log.wandb_entity and not log.wandb_project:
        setting = f"wandb-entity {log.wandb_entity}"
        yield no_effect(setting, "wandb-project is not given", "add --wandb-project")
    if not (log.profile or log.record_memory_history):
        for name in _NEED_PROFILE:
            if getattr(log, name) != getattr(default, name):
                setting = name.replace("_", "-")
                yield no_effect(setting, "nothing is profiled without profile", "add --profile")
        return
    setting = f"profile-steps {' '.join(log.profile_steps)}"
    steps = [int(step) for step in log.profile_steps if step.isdecimal()]
    if len(log.profile_steps) != 2 or len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
        what, why = f"{setting} is not a first and a last iteration", "iterations count from 1"
        yield UsageError(what, why, "use for example --profile-steps 11 12", code="value-not-valid")
    elif facts.config.training.train_iters < steps[0]:
        yield no_effect(setting, f"the run ends at {facts.config.training.train_iters}", "lower them")
    wrong = [rank for rank in log.profile_ranks if not rank.isdigit()]
    if wrong or not log.profile_ranks:
        what = f"profile-ranks {' '.join(wrong)} are not ranks" if wrong else "profile-ranks is empty"
        do = "use for example --profile-ranks 0 1"
        yield UsageError(what, "ranks are whole numbers from 0", do, code="value-not-valid")


def _eval_tasks(config: Config) -> tuple[str, ...]:
    return config.data.eval_multiple_choice + config.data.eval_completions
