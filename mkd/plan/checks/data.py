"""Check the data and the evaluations. The code that reads files checks that they exist."""

from __future__ import annotations

from collections.abc import Iterator

from mkd.config.schema import Config
from mkd.config.split import EXAMPLE_SPLIT, parse_split
from mkd.errors import MkdError, UsageError, collect_error
from mkd.plan.checks.no_effect import no_effect


def check_data(config: Config) -> Iterator[MkdError]:
    """Check that there is training data, and held-out data if evaluations are due."""
    data, training = config.data, config.training
    if not data.data_path:
        yield UsageError("no training data is given", "", "give --data-path PATH", code="data-path-missing")
    problems: list[MkdError] = []
    split = collect_error(problems, lambda: parse_split(data.split))
    yield from problems
    if split is None or not training.evaluates:
        return
    if not (data.valid_data_path or split.validation or _eval_tasks(config)):
        what = f"eval-interval {training.eval_interval} has no held-out data"
        why = f"split {data.split} leaves none for validation, and there is no valid-data-path"
        do = f"give --valid-data-path PATH, or --split {EXAMPLE_SPLIT}"
        yield UsageError(what, why, do, code="held-out-data-missing")


def check_tasks(config: Config) -> Iterator[UsageError]:
    """Check that something runs the held-out tasks and reads their settings."""
    if _eval_tasks(config) and not config.training.eval_interval:
        given = [name for name in ("eval_multiple_choice", "eval_completions") if getattr(config.data, name)]
        setting = " and ".join(given).replace("_", "-")
        yield no_effect(setting, "nothing is evaluated without eval-interval", "add --eval-interval N")
    if config.data.eval_num_fewshot and not config.data.eval_multiple_choice:
        setting = f"eval-num-fewshot {config.data.eval_num_fewshot}"
        why = "only multiple-choice questions have examples before them"
        yield no_effect(setting, why, "add --eval-multiple-choice FILE")


def _eval_tasks(config: Config) -> tuple[str, ...]:
    return config.data.eval_multiple_choice + config.data.eval_completions
