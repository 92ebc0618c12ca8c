"""Plan a run before processes communicate: models, batch and layouts, from files and flags alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mkd.checkpoint.hf.hf_assets import HFAssets
from mkd.checkpoint.hf.hf_changes import PlainTokenizer, SavesFiles, StopIds
from mkd.config.data_files import data_paths
from mkd.config.schema import Config
from mkd.errors import ErrorList, MkdError
from mkd.evaluation.task_evaluator import task_problems
from mkd.kinds.known_kinds import KINDS
from mkd.kinds.loss_card import loss_card
from mkd.log.writers import missing_packages
from mkd.operations.console import LOG
from mkd.operations.disk import disk_notes, disk_problems, writes_of
from mkd.operations.profiling import profile_problems
from mkd.operations.run_folders import (
    describe_saves,
    export_problems,
    requeue_problems,
    save_notes,
    start_problems,
)
from mkd.plan.advice.forecast_text import summarise_forecast
from mkd.plan.advice.notes import plan_notes, precision_note
from mkd.plan.advice.verdict import describe, verdict
from mkd.plan.batch import BatchPlan
from mkd.plan.checks.expert_limits import require_expert_layers
from mkd.plan.checks.problems import find_problems
from mkd.plan.checks.teacher_peers import check_machine
from mkd.plan.checks.teacher_precision import fp8_recipes
from mkd.plan.checks.vision_limits import require_deepstack_layers
from mkd.plan.facts import RunFacts
from mkd.plan.forecast import Forecast
from mkd.platform import gpu_gib, processes_of_machine
from mkd.platform.fp8_support import fp8_problems
from mkd.run.resolve.chat_setup import date_of
from mkd.run.resolve.model_source import ModelSource, locate_model
from mkd.run.resolve.preflight import Tokenizers, data_problems, open_tokenizers
from mkd.run.resolve.rollout_preflight import rollout_notes, rollout_problems
from mkd.run.resolve.trained_ends import ends_of_stores, stop_notes, trained_ends
from mkd.run.stored.stored_teacher import StoredTeacher
from mkd.tokenizers.tokenizer_files import rebuilt_example

KEPT_STOPS = "note: no token that ends a text has loss: exports stop where the student's own files do"


@dataclass(frozen=True)
class Plan:
    """Models, batch and layouts of a run, fully checked."""

    facts: RunFacts
    student: ModelSource
    # The teachers that run, or the reference: none if no loss reads them, or the teacher is stored.
    teachers: tuple[ModelSource, ...]
    stored_teacher: StoredTeacher | None = None  # its rows come with the data; no teacher runs
    tokenizers: Tokenizers | None = None  # None for engines without text
    trained_ends: tuple[int, ...] = ()  # tokens that end the texts of the training data
    gpu_gib: float | None = None  # memory of this process's GPU; None: not known

    @property
    def config(self) -> Config:
        """Settings of the run."""
        return self.facts.config

    @property
    def batch(self) -> BatchPlan:
        """Sizes of one optimizer step."""
        return self.facts.batch

    @property
    def assets(self) -> HFAssets:
        """Small files that are written beside the student's weights, with the tokenizer of the run.

        Generation stops where the student has learned to. With --max-image-side transformers must see the
        images that the student has learned from.
        """
        assert self.tokenizers is not None, "a plan without problems has tokenizers"
        images = self.tokenizers.images if self.config.data.max_image_side is not None else None
        changes: list[SavesFiles] = [] if images is None else [images.processor]
        changes += [StopIds(self.trained_ends)] if self.trained_ends else []
        changes += [PlainTokenizer()] if self._is_rebuilt else []
        return HFAssets(self.student.assets, self.tokenizers.source, tuple(changes))

    @cached_property
    def _is_rebuilt(self) -> bool:
        """True if transformers would read another tokenizer from an export than its tokenizer.json holds.

        The student's config.json beside a tokenizer of another folder may cause this.
        """
        assert self.tokenizers is not None
        source = self.tokenizers.source
        if source is None or source == self.student.assets:
            return self.tokenizers.student.is_rebuilt
        with TemporaryDirectory() as folder:
            HFAssets(self.student.assets, source).copy_to(Path(folder))
            return rebuilt_example(folder) is not None

    @property
    def choices(self) -> dict[str, object]:
        """Flag -> value that every rank chooses by itself if the flag is not given."""
        dated = self.tokenizers.opened if self.tokenizers else ()
        return {"--chat-date": date_of(dated), "--save": self.config.checkpoint.save}

    @property
    def known_ids(self) -> int:
        """Number of ids that the student and all teachers with its tokens know: none beyond is sampled."""
        return self.facts.pair.known_ids

    @cached_property
    def unused_ids(self) -> frozenset[int]:
        """Ids below `known_ids` that no token has: rows of the models without text, never sampled either."""
        if self.tokenizers is None:
            return frozenset()
        return frozenset(range(self.known_ids)).difference(self.tokenizers.student.vocabulary.values())

    @property
    def scored_ids(self) -> int:
        """Number of ids that the sampler's probabilities are over: a server's are over all of the student."""
        return self.known_ids if self.config.rollout.samples_here else self.student.shape.vocab_size

    @property
    def teacher_names(self) -> tuple[str, ...]:
        """Names of the teachers in the loss, including a stored one."""
        return self.facts.teacher_names if self.teachers or self.stored_teacher else ()

    @cached_property
    def forecast(self) -> Forecast:
        """Forecast of step time and memory."""
        return Forecast(self.facts, self.gpu_gib)

    @cached_property
    def text(self) -> str:
        """The batch (an equation), the layers on each stage, forecasts of time and memory, notes."""
        return "\n".join([describe(self.forecast), *self.notes()])

    def notes(self) -> list[str]:
        """Return what the user should know before the start, a line each."""
        notes = [*save_notes(self.config), *plan_notes(self.forecast)]
        notes += self.tokenizers.notes if self.tokenizers else ()
        notes += self.stop_notes()
        notes += rollout_notes(self.config, self.tokenizers, self.student)
        notes += precision_note(self.forecast) if self.gpu_gib is not None else []
        return notes + disk_notes(self.config, self.student.shape)

    def stop_notes(self) -> list[str]:
        """Return a note if exports stop at tokens at which the student's own files do not."""
        return list(stop_notes(self.config, self.tokenizers, self.student.assets, self.trained_ends))

    def brief(self, predicts: bool) -> str:
        """Return the batch, the models and notes; with `predicts`, also time and memory on GPUs."""
        lines = summarise_forecast(self.forecast, predicts)
        if self.config.device_memory_gib is not None:
            lines.append(verdict(self.forecast, self.config.device_memory_gib))
        return "\n".join([*lines, describe_saves(self.config), *self.notes()])

    def figures(self) -> dict[str, Any]:
        """Return the forecast as JSON values by the metric that each predicts, and as `text`."""
        return {**self.forecast.figures(), "text": self.text}

    def loss_card(self) -> str:
        """Return the objective with its numbers."""
        meta = self.stored_teacher and self.stored_teacher.meta
        stored_precision = meta.precision if meta and meta.is_fp8 else ""
        shapes = [source.shape for source in self.teachers]
        return loss_card(self.config, self.student.shape, shapes, stored_precision)


def plan_run(config: Config, world_size: int) -> Plan:
    """Resolve models, batch and layouts from files and flags alone. Raises one ErrorList."""
    problems: list[MkdError] = []
    facts = RunFacts(config, world_size, kinds=KINDS)
    student = locate_model(problems, "student", config.student)
    teachers = zip(facts.roles, config.teachers, strict=True)
    sources: list[ModelSource | None] = []
    stored_teacher = None
    if config.needs_models:
        sources = [locate_model(problems, role, one) for role, one in teachers]
    shape = student.shape if student else None
    if sources and not facts.read_teachers:
        stored_teacher = StoredTeacher.find(problems, config, sources[0], shape and shape.vocab_size)
        sources = []
    shapes = tuple(source.shape if source else None for source in sources)
    facts = replace(facts, student=shape, teachers=shapes)
    problems += find_problems(facts)
    problems += check_machine(facts, processes_of_machine(world_size))
    problems += fp8_problems(fp8_recipes(facts))
    tokenizers = open_tokenizers(problems, facts, student, sources)
    paths = data_paths(problems, config.data)
    problems += data_problems(paths, tokenizers, config, facts.roles)
    problems += rollout_problems(facts, tokenizers, student, sources)
    problems += task_problems(config)
    problems += missing_packages(config.log)
    problems += profile_problems(config.log, world_size)
    problems += [*start_problems(config.checkpoint), *requeue_problems(config)]
    problems += disk_problems(list(writes_of(config, shape, paths)))
    read = [source.assets for source in (student, *sources) if source]
    read += [tokenizers.source] if tokenizers and tokenizers.source else []
    problems += export_problems(config.checkpoint, read)
    if problems:
        raise ErrorList(problems)
    assert student is not None, "a student without a source is a problem"
    require_expert_layers(facts)
    require_deepstack_layers(facts)
    return Plan(
        facts=facts,
        student=student,
        teachers=tuple(sources),
        stored_teacher=stored_teacher,
        tokenizers=tokenizers,
        trained_ends=trained_ends(config, tokenizers),
        gpu_gib=gpu_gib(),
    )


def with_ends_of(train_set, plan: Plan) -> Plan:
    """Return the plan whose exports stop where all of the tokenised texts end.

    Before they are tokenised, only their first records are known.
    """
    if train_set is None or plan.tokenizers is None:
        return plan
    exact = replace(plan, trained_ends=ends_of_stores(train_set, plan.tokenizers))
    before, now = plan.stop_notes(), exact.stop_notes()
    for line in (now or [KEPT_STOPS]) if now != before else ():
        LOG.info(line)
    return exact
