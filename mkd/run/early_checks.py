"""Problems that can be found before torch is imported, which takes seconds.

These are problems of flags, models' config.json, missing files, folders and disks. The checks after the
import repeat them with the rest. Corpora that are not files of records are left to those.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from mkd.checkpoint.adapters import require_whole_model
from mkd.checkpoint.folders import find_weights
from mkd.checkpoint.hf.hf_hub import config_folder
from mkd.config.data_files import data_paths, is_raw
from mkd.config.models import hf_flag
from mkd.config.schema import Config, StudentConfig, TeacherConfig
from mkd.data.files.named_files import require_files
from mkd.data.stored.cache_meta import HiddenMeta
from mkd.errors import CheckpointError, MkdError, UsageError, collect_error
from mkd.kinds.known_kinds import KINDS
from mkd.kinds.placed.choice import flag_of
from mkd.operations.disk import disk_problems, writes_of
from mkd.operations.run_folders import export_problems, requeue_problems, start_problems
from mkd.plan.checks.model_alone import ModelAlone, find_model_problems
from mkd.plan.checks.problems import find_problems
from mkd.plan.facts import RunFacts
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.sides import Side, is_layout_whole, processes_apart, side_of_teacher, sides_of
from mkd.release.hub_push import HubRepository


def early_problems(config: Config, world_size: int) -> list[MkdError]:
    """Return the problems of a training run whose --save folder is chosen."""
    problems: list[MkdError] = []
    facts = RunFacts(config, world_size, kinds=KINDS)
    numbers = (None, *facts.read_teachers)
    student, *teachers = _models(problems, config, facts.roles, numbers)
    facts = replace(facts.with_running(teachers), student=student, heads=head_shapes(problems, facts))
    problems += find_problems(facts)
    for side in sides_of(config, world_size + processes_apart(config))[1:]:
        assert side.teacher is not None, "the student's side is the first"
        if is_layout_whole(config.teachers[side.teacher]):  # else its kind reports it
            problems += _side_problems(config, side, side.teacher)
    paths = data_paths([], config.data)  # the later checks report what is not a list of paths
    prompts = config.rollout.prompt_data_path if config.rollout.is_on else ()
    problems += missing_files({**paths, **dict.fromkeys(prompts, "--prompt-data-path")})
    problems += [*start_problems(config.checkpoint), *requeue_problems(config)]
    problems += disk_problems([*writes_of(config, student, paths)])
    names = [model_of(config, number).hf for number in numbers]
    read = [Path(name).expanduser() for name in names if name]
    problems += export_problems(config.checkpoint, read)
    return [*problems, *push_problems(config, [name for name in names if name])]


def _side_problems(config: Config, side: Side, teacher: int) -> list[MkdError]:
    """Return the problems of a teacher on processes of its own, in its layout."""
    alone, shape = side_of_teacher(config, teacher), model_shape([], config, teacher)
    found = find_model_problems(ModelAlone(alone, side.size, shape, teacher, KINDS, side.first))
    return [one.located(flag_of(teacher, "processes")) for one in found]


def push_problems(config: Config, reads: Sequence[str]) -> list[MkdError]:
    """Return a problem if --push-to-hub will not be allowed. Only rank 0 asks the hub."""
    checkpoint = config.checkpoint
    if checkpoint.push_to_hub is None:
        return []
    if checkpoint.export_hf is None:
        what, why = f"--push-to-hub {checkpoint.push_to_hub} without --export-hf", "the export is uploaded"
        return [UsageError(what, why, "add --export-hf FOLDER", code="add-flag")]
    if int(os.environ.get("RANK", "0")) != 0:
        return []
    problem = HubRepository(checkpoint.push_to_hub).problem(reads, checkpoint.overwrite)
    return [problem] if problem else []


def early_model_problems(
    config: Config,
    world_size: int,
    teacher: int | None = None,  # number of the teacher that runs; None: the student runs
) -> list[MkdError]:
    """Return the problems of a command that runs one model of `config` alone."""
    problems: list[MkdError] = []
    model = ModelAlone(config, world_size, teacher=teacher, kinds=KINDS)
    (shape,) = _models(problems, config, model.facts.roles, (teacher,))
    problems += find_model_problems(replace(model, shape=shape))
    if teacher is not None:  # mkd topk reads the corpora but no prompts; mkd evaluate reads its tasks alone
        problems += missing_files(data_paths([], config.data))
    return problems


def head_shapes(problems: list[MkdError], facts: RunFacts) -> tuple[ModelShape | None, ...]:
    """Return the shapes of teachers of which the student's processes have only the head.

    None in place of one after adding an error to `problems`.
    """
    teachers = [(number, facts.config.teachers[number]) for number in facts.head_numbers]
    return tuple(
        model_shape(problems, facts.config, number)
        if one.is_apart
        else collect_error(problems, partial(_head_shape, Path(one.hidden or "")))
        for number, one in teachers
    )


def _head_shape(folder: Path) -> ModelShape:
    return HiddenMeta.read(folder).shape


def _models(
    problems: list[MkdError], config: Config, roles: Sequence[str], numbers: Sequence[int | None]
) -> list[ModelShape | None]:
    """Return the shapes of the student (None) and of teachers, whose weights must exist."""
    for number in numbers:
        if model_of(config, number).load:
            role = "student" if number is None else roles[number]
            collect_error(problems, partial(_require_weights, role, model_of(config, number)))
    return [model_shape(problems, config, number) for number in numbers]


def _require_weights(role: str, source: StudentConfig | TeacherConfig) -> None:
    require_whole_model(find_weights(role, source))


def model_shape(problems: list[MkdError], config: Config, teacher: int | None) -> ModelShape | None:
    """Return the shape of the student (None) or of the teacher of that number.

    Return None if neither --student-hf nor --teacher-hf names its folder, or after adding an error to
    `problems`. For a hub id, only config.json is downloaded.
    """
    name = model_of(config, teacher).hf
    if not name:
        return None
    try:
        folder = config_folder(name)
    except CheckpointError as error:
        problems.append(error.located(hf_flag(teacher)))
        return None
    return collect_error(problems, lambda: ModelShape.from_hf_dir(folder))


def find_shape(problems: list[MkdError], config: Config, teacher: int | None) -> ModelShape | None:
    """Return the shape of the student (None) or a teacher: of its folder, hub model, or checkpoint."""
    source = model_of(config, teacher)
    if source.hf or not source.load:
        return model_shape(problems, config, teacher)
    written = sorted(Path(source.load).glob("**/hf/config.json"))
    folder = written[-1].parent if written else source.load
    return collect_error(problems, lambda: ModelShape.from_hf_dir(folder))


def model_of(config: Config, teacher: int | None) -> StudentConfig | TeacherConfig:
    """Return the settings of the student (None) or of the teacher of that number."""
    return config.student if teacher is None else config.teachers[teacher]


def missing_files(paths: Mapping[str, str]) -> list[MkdError]:
    """Return an error for every path of records in `paths` (path -> its flag) that names no files."""
    problems: list[MkdError] = []
    for path, flag in paths.items():
        if is_raw(path):
            collect_error(problems, partial(require_files, path, flag))
    return problems
