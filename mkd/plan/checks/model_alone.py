"""The problems of running one model of a configuration alone, for an evaluation or an export."""

from __future__ import annotations

from dataclasses import replace

from mkd.config.schema import Config, KDConfig
from mkd.errors import MkdError, UsageError, collect_error
from mkd.plan.auto_layout import PlannedModel, layout_of, one_model, virtual_stages
from mkd.plan.batch import data_parallel_of
from mkd.plan.checks.expert_limits import check_expert_settings, check_experts
from mkd.plan.checks.parallel import check_ffn, check_heads, check_parallel, check_sequences
from mkd.plan.checks.ranges import EXPERTS, PACKS, SHARDS, STAGES, check_ranges, options_out_of_range
from mkd.plan.checks.teacher_peers import check_peers, check_replicas
from mkd.plan.checks.teacher_precision import check_precision, check_precision_of_models
from mkd.plan.checks.vision_limits import first_part_problems
from mkd.plan.model_shape import ModelShape

READ_BY_A_MODEL = (
    *SHARDS,
    *STAGES,
    "seq_length",
    "micro_batch_size",
    "seed",
    "num_workers",
    "max_bad_records",
    "max_image_pixels",
    "max_image_side",
    "max_patches_per_pack",
    "kd_temperature",
    "teacher_temperature",
    "teacher_peers",
    "distributed_timeout_minutes",
    *EXPERTS,
)
"""Numbers that matter to a model that runs alone."""


def find_model_problems(
    config: Config,
    world_size: int,
    model: ModelShape | None,  # None: its shape could not be read, which has been reported
    teacher: int | None = None,  # number of the teacher that runs; None: the student runs
) -> list[MkdError]:
    """Return the problems of running one model on `world_size` processes. Training settings are ignored."""
    wrong = options_out_of_range(config).intersection(READ_BY_A_MODEL)
    problems: list[MkdError] = [*check_ranges(config, READ_BY_A_MODEL)]
    source = config.student if teacher is None else config.teachers[teacher]
    if not (source.hf or source.load):
        role = "student" if teacher is None else "teacher"
        do = f"give --{role}-hf DIR or --{role}-load CKPT"
        missing = UsageError(f"no {role} is given", "it is the model that runs", do, code="model-missing")
        problems.append(missing)
    problems += [*check_parallel(config), *check_expert_settings(config)]
    if wrong.isdisjoint((*PACKS, *SHARDS)):
        problems += check_sequences(config)
    if wrong.isdisjoint((*SHARDS, *STAGES)):
        collect_error(problems, lambda: data_parallel_of(config, world_size))
    if teacher is not None and wrong.isdisjoint((*SHARDS, *STAGES, *EXPERTS, "teacher_peers")):
        alone, models = teacher_alone(config, model, teacher)
        problems += [*check_peers(alone), *check_replicas(alone, world_size, models)]
        problems += check_precision_of_models(alone, world_size, models)
        if wrong.isdisjoint(PACKS):
            problems += check_precision(alone)
    if model is None:
        return problems
    models = (one_model(config, model, teacher),)
    if "tensor_model_parallel_size" not in wrong:
        problems += check_ffn(config, world_size, models)
    if wrong.isdisjoint(SHARDS):
        problems += check_heads(config, world_size, models)
    if wrong.isdisjoint((*SHARDS, *STAGES, *EXPERTS)):
        problems += check_experts(config, world_size, models)
    if wrong.isdisjoint(STAGES):
        stages = collect_error(problems, lambda: virtual_stages(config, model))
        if stages is not None and not problems:
            layout = collect_error(problems, lambda: layout_of(config, model, stages, teacher))
            if layout is not None:
                problems += first_part_problems(models[0].role, models[0].layout_flag, model, layout)
    return problems


def teacher_alone(
    config: Config,
    model: ModelShape | None,  # None: it could not be read
    teacher: int,
) -> tuple[Config, tuple[PlannedModel, ...]]:
    """Return the configuration with that teacher only, in which it runs, and the teacher if it is known."""
    alone = replace(config, teachers=(config.teachers[teacher],), kd=KDConfig())
    return alone, () if model is None else (one_model(alone, model, 0),)
