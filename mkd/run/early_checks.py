"""Problems that can be found before torch is imported, which takes seconds.

Only files and flags are checked here; `plan_run` repeats these checks with the rest. Models on the hub, and
corpora that are not files of records, are left to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from mkd.config.data_files import HUB_ID, RAW_SUFFIXES, require_file
from mkd.config.schema import Config, StudentConfig, TeacherConfig
from mkd.errors import CheckpointError, MkdError, collect_error
from mkd.operations.run_folders import start_problems
from mkd.plan.checks.problems import find_problems
from mkd.plan.model_shape import ModelShape


def early_problems(config: Config, world_size: int) -> list[MkdError]:
    """Return the problems of settings, models' config.json, places of checkpoints, and missing files."""
    problems: list[MkdError] = []
    student = _shape(problems, config.student)
    runs = config.needs_models and not (config.teachers and config.teachers[0].topk)
    shapes = [_shape(problems, teacher) for teacher in config.teachers] if runs else []
    problems += find_problems(config, world_size, student, shapes)
    for flag, path in _files(config):
        collect_error(problems, partial(require_file, path, flag))
    return [*problems, *start_problems(config.checkpoint)]


def _shape(problems: list[MkdError], source: StudentConfig | TeacherConfig) -> ModelShape | None:
    """Return the shape of a model folder; None for another place of a model, or after adding a problem."""
    if not source.hf:
        return None
    folder = Path(source.hf).expanduser()
    if folder.is_dir():
        return collect_error(problems, lambda: ModelShape.from_hf_dir(folder))
    if not HUB_ID.fullmatch(source.hf):
        what = f"{source.hf!r} is neither a model folder nor a Hugging Face model to download"
        why = "there is no folder of this name, and an id of the hub looks like org/name"
        problems.append(CheckpointError(what, why, "check the path", code="hf-model-not-found"))
    return None


def _files(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (flag, path) of every file of records that the flags name. Weights of a blend have no suffix."""
    data = config.data
    given = {
        "--data-path": data.data_path,
        "--valid-data-path": data.valid_data_path,
        "--prompt-data-path": config.rollout.prompt_data_path,
    }
    for flag, values in given.items():
        yield from ((flag, value) for value in values if Path(value).suffix in RAW_SUFFIXES)
