"""Held-out tasks without training: one model of a configuration, in its layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from mkd.config.schema import CheckpointConfig, Config, KDConfig, LogConfig, OptimizerConfig
from mkd.errors import ErrorList, MkdError
from mkd.evaluation.task_evaluator import TaskEvaluator
from mkd.evaluation.tasks import Task
from mkd.models.builder import build_chunks
from mkd.models.transformer_config import ModelOptions
from mkd.parallel.context import ParallelContext
from mkd.plan.auto_layout import layouts_of, virtual_stages
from mkd.plan.checks.problems import find_problems
from mkd.platform import Platform
from mkd.run.build_engine import load_weights
from mkd.run.model_source import ModelSource, locate_model
from mkd.tokenizers.load import load_tokenizer


def evaluate_student(
    config: Config, tasks: Sequence[Task], platform: Platform, world_size: int, say: Callable[[str], None]
) -> dict[str, float]:
    """Metrics of the student of `config`, from --student-hf or --student-load; all that is for training is not read.

    Collective. Raises one ErrorList for what is wrong with settings and model, and DataError for what cannot be scored.
    """
    problems: list[MkdError] = []
    config = without_training(config, world_size)
    source = locate_model(problems, "student", config.student)
    problems += find_problems(config, world_size, source and source.shape)
    if problems:
        raise ErrorList(problems)
    data = config.data
    tokenizer = load_tokenizer(data.tokenizer_type, data.tokenizer_model or str(source.assets))
    context = _join(config, platform, virtual_stages(config, source.shape))
    evaluator = TaskEvaluator.build(
        tasks,
        tokenizer,
        context,
        vocab_size=source.shape.vocab_size,
        seq_length=config.training.seq_length,
        micro_batch_size=config.training.micro_batch_size,
    )
    for line in evaluator.describe():
        say(line)
    metrics = evaluator.evaluate(_build(config, source, context))
    context.leave()
    return metrics


def without_training(config: Config, world_size: int) -> Config:
    """The student of `config` alone, in its layout, with settings that any run must have."""
    parallel, training = config.parallel, config.training
    replica = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    is_interleaved = (
        parallel.num_virtual_stages_per_pipeline_rank or parallel.num_layers_per_virtual_pipeline_stage
    )
    no_tasks = dict(
        eval_multiple_choice=(), eval_completions=(), eval_num_fewshot=0
    )  # of the evaluations of a run
    batch = (
        training.micro_batch_size * world_size // replica if is_interleaved else None
    )  # one for each pipeline rank
    return replace(
        config,
        teachers=(),
        kd=KDConfig(kd_ratio=0.0),
        data=replace(config.data, data_path=("not read",), valid_data_path=(), **no_tasks),
        training=replace(training, train_iters=1, eval_interval=None, global_batch_size=batch),
        optimizer=OptimizerConfig(),
        checkpoint=CheckpointConfig(),
        log=LogConfig(name=config.log.name, log_dir=config.log.log_dir),
    )


def _join(config: Config, platform: Platform, stages: int) -> ParallelContext:
    parallel = config.parallel
    return ParallelContext.create(
        platform,
        tensor_parallel=parallel.tensor_model_parallel_size,
        pipeline_parallel=parallel.pipeline_model_parallel_size,
        context_parallel=parallel.context_parallel_size,
        virtual_stages=stages,
        timeout_minutes=parallel.distributed_timeout_minutes,
    )


def _build(config: Config, source: ModelSource, context: ParallelContext) -> list:
    """The chunks of this rank, with weights."""
    options = ModelOptions(
        dtype=torch.bfloat16 if config.training.bf16 else torch.float32,
        sequence_parallel=config.parallel.sequence_parallel,
        deterministic=config.training.deterministic_mode,
    )
    layout, _ = layouts_of(config, source.shape, (), context.virtual_stages)
    models = build_chunks(source.shape, layout, options, context)
    load_weights(models, source, context)
    return models
