"""Evaluate held-out tasks during training: encoded once, scored at every evaluation, reported with losses."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from megatron.core.utils import get_attr_wrapped_model

from mkd.checkpoint.folders import TrainingPosition
from mkd.config.schema import Config
from mkd.data.images.conversation import ConversationImages
from mkd.data.images.row_images import row_images_of
from mkd.errors import ErrorList, MkdError
from mkd.evaluation.requests import encode_pairs
from mkd.evaluation.scores import RequestBatches, log_likelihoods
from mkd.evaluation.tasks import Task, read_tasks
from mkd.human import counted
from mkd.models.language_model import LanguageModel
from mkd.operations.console import LOG
from mkd.operations.stopping import Stopper
from mkd.parallel.context import ParallelContext
from mkd.tokenizers.tokenizer import Tokenizer
from mkd.train.report import Reporter
from mkd.train.step import Engine
from mkd.train.teachers.same_tokens import SameTokens


def tasks_of(config: Config) -> list[Task]:
    """Return the tasks that `config` names; reads only files. Raises ErrorList, with one problem a file."""
    data = config.data
    return read_tasks(data.eval_multiple_choice, data.eval_completions, data.eval_num_fewshot)


def task_problems(config: Config) -> list[MkdError]:
    """Return the problems of task files, for the list of all problems of a run."""
    try:
        tasks_of(config)
    except ErrorList as error:
        return error.errors
    return []


@dataclass(frozen=True)
class TaskEvaluator:
    """Tasks in the ids of one tokenizer, ready to be scored by models that read it."""

    tasks: tuple[Task, ...]
    borders: tuple[int, ...]  # task i has the requests [borders[i], borders[i + 1])
    batches: RequestBatches

    @classmethod
    def build(
        cls,
        tasks: Sequence[Task],
        tokenizer: Tokenizer,
        context: ParallelContext,
        *,
        vocab_size: int,  # number of token ids that every evaluated model knows
        seq_length: int,  # tokens of a pack
        micro_batch_size: int,  # packs
        images: ConversationImages | None = None,  # reads the images of records; None: the models read none
        sequence_parallel: bool = False,
        num_workers: int = 0,  # processes that decode images
    ) -> TaskEvaluator:
        """Encode the tasks. Raises DataError with file and line for a continuation that cannot be scored."""
        encoded = [encode_pairs(task.pairs(), tokenizer, seq_length, vocab_size, images) for task in tasks]
        borders = tuple(accumulate(map(len, encoded), initial=0))
        requests = [request for of_task in encoded for request in of_task]
        row_images = row_images_of(images, context, sequence_parallel)
        pad_id = tokenizer.padding_id(vocab_size)
        batches = RequestBatches.of(
            requests, context, micro_batch_size, seq_length, pad_id, row_images, num_workers
        )
        return cls(tuple(tasks), borders, batches)

    def describe(self) -> list[str]:
        """Return one line for each task: its size, and how many prompts lost their beginning."""
        lines = []
        for task, (first, last) in zip(self.tasks, pairwise(self.borders), strict=True):
            cut = sum(request.is_truncated for request in self.batches.requests[first:last])
            prompts = f"{counted(cut, 'prompt')} cut to {self.batches.seq_length} tokens"
            lines.append(f"{task.name}: {counted(last - first, 'continuation')}, {prompts}")
        return lines

    def evaluate(
        self, models: Sequence[LanguageModel], label: str = "", stopper: Stopper | None = None
    ) -> dict[str, float] | None:
        """Return `eval/<task>/<label><metric>` of the model whose parts on this rank are `models`.

        Collective. The values are equal on all ranks. Return None if `stopper`, asked between batches, has
        stopped it.
        """
        scores = log_likelihoods(models, self.batches, stopper)
        if scores is None:
            return None
        num_tokens = np.array([len(request.labels) for request in self.batches.requests])
        return {
            f"eval/{task.name}/{label}{metric}": value
            for task, (first, last) in zip(self.tasks, pairwise(self.borders), strict=True)
            for metric, value in task.metrics(scores[first:last], num_tokens[first:last]).items()
        }


def build_tasks(
    config: Config,
    tokenizer: Tokenizer,
    vocab_size: int,
    context: ParallelContext,
    images: ConversationImages | None = None,  # the student's
) -> TaskEvaluator | None:
    """Return a run's tasks, in ids of `tokenizer`; None without any. DataError as `TaskEvaluator.build`."""
    tasks = tasks_of(config)
    if not (tasks and config.training.evaluates):
        return None
    return TaskEvaluator.build(
        tasks,
        tokenizer,
        context,
        vocab_size=vocab_size,
        seq_length=config.training.seq_length,
        micro_batch_size=config.training.micro_batch_size,
        images=images,
        sequence_parallel=config.parallel.sequence_parallel,
        num_workers=config.data.num_workers,
    )


def evaluate_tasks(
    evaluator: TaskEvaluator, engine: Engine, stopper: Stopper | None = None
) -> dict[str, float] | None:
    """Return the metrics of a run's student, or None if it was stopped. The teachers do not run."""
    students = [get_attr_wrapped_model(stage, "student") for stage in engine.stages]
    with engine.parameters_gathered():
        return evaluator.evaluate(students, stopper=stopper)


def evaluate_teachers(
    evaluator: TaskEvaluator,
    engine: Engine,
    stopper: Stopper | None = None,
    names: Container[str] | None = None,  # of the teachers; None: all
) -> dict[str, float] | None:
    """Return the metrics `eval/<task>/<teacher>/...` of the teachers that read the student's tokens.

    Only teachers that run have metrics. Return None if the evaluation was stopped.
    """
    metrics: dict[str, float] = {}
    # By virtual stage and teacher.
    models = [get_attr_wrapped_model(stage, "teachers") for stage in engine.stages]
    for teacher in engine.teachers:
        if not isinstance(teacher, SameTokens) or (names is not None and teacher.name not in names):
            continue
        (index,) = teacher.indices
        if index >= len(models[0]):  # its hidden states are stored, not its layers
            continue
        of_teacher = evaluator.evaluate([stage[index] for stage in models], f"{teacher.name}/", stopper)
        if of_teacher is None:
            return None
        metrics |= of_teacher
    return metrics


def report_tasks(reporter: Reporter, position: TrainingPosition, metrics: dict[str, float]) -> None:
    """Write one record with `split: "tasks"`, and print one line."""
    names = "iteration", "consumed_samples", "consumed_tokens"
    place = {name: getattr(position, name) for name in names}
    reporter.logger.write({**place, **metrics, "split": "tasks"})
    LOG.info(task_line(position.iteration, metrics))


def task_line(iteration: int, metrics: dict[str, float]) -> str:
    """Return the line for people: every metric except the counts."""
    keys = [key for key in metrics if "/num_" not in key]
    shown = [f"{key.removeprefix('eval/')}: {metrics[key]:.6E}" for key in keys]
    return " | ".join([f"task results at iteration {iteration}", *shown]) + " |"
