"""All checks of a configuration, in the order of their problems.

A check is a function that returns or yields its problems, and raises none. Adding one means listing it here, with the options
that it calculates with: it is skipped if one of these is out of range, because `check_ranges` has reported that already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from mkd.config.schema import Config
from mkd.errors import MkdError, UsageError, collect_error
from mkd.plan.auto_layout import (
    PlannedModel,
    lone_layout,
    lone_shapes,
    planned_models,
    virtual_stages,
)
from mkd.plan.checks.data import check_data, check_tasks
from mkd.plan.checks.folders import check_folders
from mkd.plan.checks.log import check_log
from mkd.plan.checks.parallel import (
    check_auto_layout,
    check_batch,
    check_ffn,
    check_heads,
    check_layouts,
    check_parallel,
    check_processes,
    check_sequences,
)
from mkd.plan.checks.ranges import (
    BATCH,
    PACKS,
    READ_BY_A_MODEL,
    SHARDS,
    STAGES,
    check_ranges,
    options_out_of_range,
)
from mkd.plan.checks.teachers import check_models, check_objective
from mkd.plan.checks.training import check_length, check_recomputation, check_schedule
from mkd.plan.model_shape import ModelShape

SETTINGS_CHECKS: Mapping[Callable[[Config], Iterable[MkdError]], Sequence[str]] = {
    check_ranges: (),
    check_length: (),
    check_models: (),
    check_objective: (),
    check_data: (),
    check_folders: (),
    check_tasks: (),
    check_schedule: (),
    check_recomputation: (),
    check_parallel: (),
    check_log: (),
    check_sequences: (*PACKS, *SHARDS),
}
"""Checks of the settings alone -> the options that they calculate with."""

MODEL_CHECKS: Mapping[Callable[[Config, int, Sequence[PlannedModel]], Iterable[MkdError]], Sequence[str]] = {
    check_batch: (*BATCH, *SHARDS, *STAGES),
    check_ffn: ("tensor_model_parallel_size",),
    check_heads: SHARDS,
    check_layouts: STAGES,
}
"""Checks of the settings on a number of processes, with the models whose shapes are known -> the same."""


def find_problems(
    config: Config,
    world_size: int,
    student: ModelShape | None = None,
    teachers: Sequence[ModelShape | None] = (),  # those that run, in the order of the configuration
) -> list[MkdError]:
    """Return every problem of `config` on `world_size` processes; empty if the run can start.

    A model whose shape is None is not checked.
    """
    wrong = options_out_of_range(config)
    models = tuple(planned_models(config, (student, *teachers)))
    problems: list[MkdError] = []
    for check, options in SETTINGS_CHECKS.items():
        if wrong.isdisjoint(options):
            problems += check(config)
    for check, options in MODEL_CHECKS.items():
        if wrong.isdisjoint(options):
            problems += check(config, world_size, models)
    if not problems and None not in (student, *teachers):
        problems += check_auto_layout(config, world_size, models)
    return problems


def find_model_problems(
    config: Config, world_size: int, model: ModelShape | None, teacher: int | None = None
) -> list[MkdError]:
    """Return the problems of running one model of `config` alone: the student, or the teacher of that number.

    Settings that only training reads are not checked, nor is a model whose shape is None.
    """
    wrong = options_out_of_range(config).intersection(READ_BY_A_MODEL)
    problems: list[MkdError] = list(check_ranges(config, READ_BY_A_MODEL))
    source = config.student if teacher is None else config.teachers[teacher]
    if not (source.hf or source.load):
        role = "student" if teacher is None else "teacher"
        fix = f"give --{role}-hf DIR or --{role}-load CKPT"
        problems.append(UsageError(f"no {role} is given", "it is what runs", fix, code=f"{role}-missing"))
    problems += check_parallel(config)
    if wrong.isdisjoint((*PACKS, *SHARDS)):
        problems += check_sequences(config)
    if wrong.isdisjoint((*SHARDS, *STAGES)):
        problems += check_processes(config, world_size)
    models = tuple(planned_models(config, lone_shapes(model, teacher)))
    for check in (check_ffn, check_heads):
        if wrong.isdisjoint(MODEL_CHECKS[check]):
            problems += check(config, world_size, models)
    if model is not None and not problems:
        collect_error(problems, lambda: lone_layout(config, model, virtual_stages(config, model), teacher))
    return problems
