"""Plan and build one model of a configuration alone.

This serves to evaluate a student without training, or to export a teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mkd.checkpoint.rounded_runs import require_exact_model
from mkd.config.schema import Config, TeacherConfig
from mkd.data.images.conversation import image_reader
from mkd.errors import ErrorList, MkdError, collect_error
from mkd.evaluation.task_evaluator import TaskEvaluator
from mkd.evaluation.tasks import Task
from mkd.kinds.known_kinds import KINDS, device_problems
from mkd.models.builder import build_model_parts
from mkd.models.language_model import LanguageModel
from mkd.models.transformer_config import ModelOptions
from mkd.operations.console import LOG
from mkd.operations.watchdog import MARGIN_S
from mkd.parallel.context import ParallelContext
from mkd.plan.checks.model_alone import ModelAlone, find_model_problems
from mkd.plan.parallel_sizes import Sizes
from mkd.plan.sides import document_multiple
from mkd.platform import Platform, processes_of_machine
from mkd.resolve.chat_setup import chat_settings
from mkd.resolve.model_source import ModelSource, locate_model
from mkd.run.build_models import build_teacher_parts, load_weights
from mkd.tokenizers.load import load_tokenizer


@dataclass(frozen=True)
class ModelPlan:
    """One model and its weights. Only the parts of `config` that this model needs have been checked."""

    model: ModelAlone
    source: ModelSource

    @property
    def config(self) -> Config:
        """Settings of the run."""
        return self.model.config

    def join(self, platform: Platform) -> ParallelContext:
        """Join the process group in the model's layout. Collective."""
        return join(self.config, self.model.sizes, self.model.virtual_stages, platform)

    def build(self, context: ParallelContext) -> list[LanguageModel]:
        """Build this rank's parts of the model, with their weights."""
        training = self.config.training
        options = ModelOptions(
            dtype=torch.bfloat16 if training.bf16 else torch.float32,
            sequence_parallel=self.config.parallel.sequence_parallel,
            deterministic=training.deterministic_mode,
        )
        settings, layout = self.model.settings, self.model.layout
        if isinstance(settings, TeacherConfig):
            return build_teacher_parts(self.source, settings, layout, options, context)
        models = build_model_parts(self.source.shape, layout, options, context)
        load_weights(models, self.source, context)
        return models


def plan_model(
    problems: list[MkdError],
    config: Config,
    world_size: int,
    teacher: int | None = None,  # number of the teacher that runs; None: the student runs
    first: int = 0,  # rank of the first of its processes in the launch
) -> ModelPlan | None:
    """Plan one model. After adding errors to `problems` return None."""
    model = ModelAlone(config, world_size, teacher=teacher, kinds=KINDS, first=first)
    source = locate_model(problems, model.role, model.settings)
    if source is not None and source.load is not None:
        load = source.load
        collect_error(problems, lambda: require_exact_model(load))
    model = replace(model, shape=source.shape if source else None)
    problems += find_model_problems(model)
    if teacher is not None:
        problems += model.of_teacher.machine_problems(processes_of_machine(first + world_size))
        problems += device_problems(model.of_teacher)
    if problems:
        return None
    assert source is not None, "a model without a source is a problem"
    return ModelPlan(model, source)


def join(config: Config, sizes: Sizes, stages: int, platform: Platform) -> ParallelContext:
    """Join the process group with `stages` virtual stages on each pipeline rank. Collective."""
    return ParallelContext.create(
        platform,
        sizes,
        virtual_stages=stages,
        # Wait longer than the watchdog, whose report says more.
        timeout_minutes=config.parallel.distributed_timeout_minutes + MARGIN_S / 60,
        divides_documents=document_multiple(config),
    )


def evaluate_student(
    config: Config, tasks: Sequence[Task], platform: Platform, world_size: int
) -> dict[str, float]:
    """Return the metrics of the student of --student-hf or --student-load. Ignore training settings.

    Collective. With --dry-run there are none: it ends after the checks. Raises one ErrorList for problems of
    settings and model, and DataError for a task that cannot be scored.
    """
    problems: list[MkdError] = []
    plan = plan_model(problems, config, world_size)
    if plan is None:
        raise ErrorList(problems)
    data = config.data
    name = data.tokenizer_model or str(plan.source.assets)
    tokenizer = load_tokenizer(data.tokenizer_type, name, chat_settings(config))
    images = image_reader(
        plan.source.assets, tokenizer, data.image_root, data.max_image_pixels, data.max_image_side
    )
    context = plan.join(platform)
    seen: dict[str, Any] = dict(
        images=images, sequence_parallel=config.parallel.sequence_parallel, num_workers=data.num_workers
    )
    sizes: dict[str, Any] = dict(
        seq_length=config.training.seq_length, micro_batch_size=config.training.micro_batch_size
    )
    vocab_size = plan.source.shape.vocab_size
    evaluator = TaskEvaluator.build(tasks, tokenizer, context, vocab_size=vocab_size, **sizes, **seen)
    for line in evaluator.describe():
        LOG.info(line)
    metrics = {} if config.dry_run else evaluator.evaluate(plan.build(context))
    context.leave()
    return metrics
