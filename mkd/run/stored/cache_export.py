"""Run a teacher over the packs of a run and store what a kind of cache has of it.

Commands: `mkd topk`, `mkd hidden`. The teacher runs alone, on the packs that the run's tokenizer and data
settings make, under any layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mkd.checkpoint.hf.hf_hub import resolve_hf
from mkd.config.data_files import data_paths
from mkd.config.models import EXPORTED, teacher_names
from mkd.config.schema import Config
from mkd.config.split import parse_split
from mkd.data.batch import PackedBatch
from mkd.data.dataset import BlendedDataset
from mkd.data.images.conversation import ConversationImages
from mkd.data.images.row_images import ImageLayout
from mkd.data.loader import EMPTY, BatchLayout, Dealt, MicroBatches, read_ahead
from mkd.data.stored.cache_files import ShardWriter, pack_digest
from mkd.data.stored.cache_meta import CacheMeta
from mkd.errors import ErrorList, MkdError, NonFiniteError, UsageError, collect_error
from mkd.human import counted
from mkd.kinds.known_kinds import KINDS, teacher_setup, wanted_records
from mkd.models.builder import join_stages
from mkd.models.language_model import LanguageModel
from mkd.models.stage import DistillationStage, StageOutput
from mkd.operations.console import LOG
from mkd.operations.disk import Written, cache_writes, disk_problems
from mkd.operations.phases import Phases
from mkd.operations.shared_build import SharedBuild
from mkd.operations.signals import Signals
from mkd.parallel.agreement import require_same_choices
from mkd.parallel.context import ParallelContext
from mkd.parallel.pipeline import PipelineCommunicator
from mkd.plan.facts import RunFacts
from mkd.platform import Platform
from mkd.resolve.chat_setup import chat_problems, chat_settings
from mkd.resolve.image_reader import open_images
from mkd.resolve.model_source import ModelSource, locate_model
from mkd.resolve.preflight import Tokenizers, data_problems, open_own_tokenizer, wider_than_head
from mkd.resolve.teacher_setup import TeacherSetup
from mkd.run.build_data import open_data
from mkd.run.one_model import plan_model
from mkd.run.stored.cache_description import ExportPlan, ExportSettings, require_room, write_description
from mkd.tokenizers.chat_input import ChatSettings
from mkd.tokenizers.load import load_tokenizer
from mkd.tokenizers.tokenizer import Tokenizer
from mkd.train.schedule import MICROBATCHES_PER_STAGE, PipelineSchedule


class CacheKind(Protocol):
    """The contents of a cache: their description, and how they are made from a teacher."""

    @property
    def settings(self) -> ExportSettings:
        """Settings besides those of the run."""

    def check(self, plan: ExportPlan) -> None:
        """Raise UsageError for settings that do not fit the models."""

    def describe(self, plan: ExportPlan, parts: dict[str, int]) -> CacheMeta:
        """Return the description of the cache. `parts`: data set -> packs."""

    def prepare(self, models: list[LanguageModel], meta: Any, context: ParallelContext) -> CacheMeta:
        """Write what the cache has besides shards, and return the description. Collective."""

    def writer(self, path: Path, meta: Any) -> ShardWriter:
        """Return the writer of a shard."""

    def columns(
        self, meta: Any, stage: DistillationStage, batch: PackedBatch, output: StageOutput
    ) -> tuple[list[np.ndarray], Tensor]:
        """Return (columns of the loss rows of this process, [n] True where they are not finite)."""


def export_teacher(config: Config, kind: CacheKind, platform: Platform, world_size: int) -> CacheMeta | None:
    """Write the missing shards of the cache of `kind`, for the teacher of `config` and all its data.

    Collective. With --dry-run it ends with None after the checks. Raises the errors of a training run, and
    DataError if the folder holds another cache.
    """
    settings = kind.settings
    plan = plan_export(config, world_size, settings.out)
    if len(config.teachers) > 1:
        names = teacher_names(config.teachers)
        LOG.warning("%d teachers are configured: the first, %s, is exported", len(names), names[EXPORTED])
    kind.check(plan)
    if require_room(settings, partial(kind.describe, plan)):
        plan = plan_export(config, world_size)  # a new cache does not take the date of the one it replaces
    if config.dry_run:
        return None
    _make_folder(settings.out)
    context = plan.teacher.join(platform)
    require_same_choices({"--chat-date": plan.tokenizer.chat_date})
    build, of_teacher = SharedBuild(context, Signals(), Phases()), plan.teacher.source.shape.vocab_size
    texts = [one.meet(config, plan.tokenizers, context).text for one in plan.beside]
    train_set, valid_set = open_data(config, plan.tokenizer, of_teacher, build, texts, plan.images)
    datasets = {"train": train_set} | ({} if valid_set is None else {"valid": valid_set})
    for member in (member for dataset in datasets.values() for member in dataset.members):
        member.teachers = member.taught = ()  # the packs are made, and their own tokens are not read here
    parts = {name: len(dataset) for name, dataset in datasets.items()}
    meta = _describe(plan, kind, parts, context)
    _require_disk(settings.out, meta, datasets, context)
    exporter = _Exporter.build(plan, kind, meta, context)
    for part, dataset in datasets.items():
        exporter.export(part, dataset)
    context.leave()
    return exporter.meta


def plan_export(
    config: Config,
    world_size: int,
    out: Path | None = None,  # a cache there is resumed
) -> ExportPlan:
    """Plan the first teacher of `config` alone. Ignore settings of the student, the loss and training.

    Raises one ErrorList with all problems of the teacher, the tokenizer and the data.
    """
    if not config.teachers or not (config.teachers[EXPORTED].hf or config.teachers[EXPORTED].load):
        why = "its predictions are exported"
        raise UsageError("no teacher is given", why, "give --teacher-hf DIR", code="model-missing")
    problems: list[MkdError] = []
    teacher = plan_model(problems, config, world_size, EXPORTED)
    if config.teachers[EXPORTED].context is not None:
        what, why = "the teacher has a context", "its predictions are stored for the student's own prompts"
        do = "remove it, or run the teacher in every step: --teacher-hf"
        problems.append(UsageError(what, why, do, code="stored-teacher-excludes"))
    if not config.data.data_path:
        do = "give --data-path PATH"
        problems.append(UsageError("no training data is given", "", do, code="data-path-missing"))
    collect_error(problems, lambda: parse_split(config.data.split))
    # The run reads with its own tokenizer, the student's, or the teacher's.
    kind, name = config.data.tokenizer_type, config.data.tokenizer_model or config.student.hf
    tokenizer = images = None
    facts = RunFacts(config, world_size, kinds=KINDS)
    beside: list[TeacherSetup] = []
    own: list[Tokenizer | None] = []
    if teacher is not None:
        source, folder = teacher.source, name or str(teacher.source.assets)
        chat = collect_error(problems, partial(chat_settings, config, out))
        tokenizer = collect_error(problems, lambda: load_tokenizer(kind, folder, chat))
    if teacher is not None and tokenizer is not None:
        problems += chat_problems(tokenizer, config)
        problems += wider_than_head(tokenizer, config, "teacher", source)
        images = collect_error(problems, partial(_open_images, config, source, tokenizer))
        beside, own = _teachers_beside(problems, facts, chat)
    paths = data_paths(problems, config.data)
    tokenizers = None if tokenizer is None else Tokenizers(tokenizer, tuple(own), None, (), images)
    problems += data_problems(paths, tokenizers, config, wanted_records(config), facts.roles)
    problems += disk_problems(list(cache_writes(config, paths)))
    if problems:
        raise ErrorList(problems)
    assert teacher is not None and tokenizers is not None, "what is missing is a problem"
    return ExportPlan(teacher, tokenizers, tuple(beside))


def _teachers_beside(
    problems: list[MkdError], facts: RunFacts, chat: ChatSettings | None
) -> tuple[list[TeacherSetup], list[Tokenizer | None]]:
    """Return the other teachers with tokens of their own, and the own tokenizer of every teacher, or None.

    They do not run, but a document that one of them refuses is in no pack of the run.
    """
    found: list[TeacherSetup] = []
    own: list[Tokenizer | None] = [None] * len(facts.roles)
    for index, settings in facts.running.items():
        if index == EXPORTED or (settings.xtoken is None and settings.context is None):
            continue
        role, source = facts.roles[index], locate_model(problems, facts.roles[index], settings)
        setup = None if source is None else teacher_setup(problems, facts, index, source)
        if source is not None and settings.xtoken is not None:
            own[index] = collect_error(problems, partial(open_own_tokenizer, role, source, chat))
        found += [] if setup is None else [setup]
    return found, own


def _open_images(config: Config, teacher: ModelSource, tokenizer: Tokenizer) -> ConversationImages | None:
    """Return the reader of the student's images; of the teacher's if no student is given."""
    student = resolve_hf(config.student.hf) if config.student.hf else teacher.assets
    return open_images(config, student, [teacher.assets], tokenizer)


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot make --out {out}: {error}"
        why = "the cache is written there"
        raise UsageError(what, why, "choose another one", code="not-writable") from error


def _describe(
    plan: ExportPlan, kind: CacheKind, parts: dict[str, int], context: ParallelContext
) -> CacheMeta:
    """Return the cache's description on every rank, and write a new one. DataError if one differs."""
    outcome: CacheMeta | Exception | None = None
    if context.rank == 0:
        try:
            outcome = write_description(plan, kind.settings, kind.describe(plan, parts))
        except Exception as error:  # every kind of error, because the other ranks wait
            outcome = error
    outcome = context.broadcast_object(outcome)
    if isinstance(outcome, Exception):
        outcome.on_all_ranks = True
        raise outcome
    return outcome


def _require_disk(
    out: Path, meta: CacheMeta, datasets: Mapping[str, BlendedDataset], context: ParallelContext
) -> None:
    """Raise UsageError on every rank if the missing shards do not fit the disk. Collective."""
    problems: list[UsageError] = []
    if context.rank == 0:
        rows = 0
        for part, dataset in datasets.items():
            left = len(meta.missing_shards(out, part)) / max(1, meta.num_shards(part))
            rows += round(left * sum(member.num_loss_tokens for member in dataset.members))
        written = Written(f"a cache of {counted(rows, 'loss token')}", "--out", out, rows * meta.least_bytes)
        problems = list(disk_problems([written]))
    for problem in context.broadcast_object(problems):
        problem.on_all_ranks = True
        raise problem


@dataclass(frozen=True)
class _Exporter:
    """A teacher, its schedule, and the folder of the cache."""

    kind: CacheKind
    meta: CacheMeta
    context: ParallelContext
    schedule: PipelineSchedule
    stages: list[DistillationStage]
    layout: BatchLayout
    num_workers: int

    @classmethod
    def build(cls, plan: ExportPlan, kind: CacheKind, meta: CacheMeta, context: ParallelContext) -> _Exporter:
        """Build the teacher with its weights."""
        models, training = plan.teacher.build(context), plan.config.training
        meta = kind.prepare(models, meta, context)
        stages = [stage.eval() for stage in join_stages(models)]
        communicator = PipelineCommunicator(context.pp_group, models[0].config)
        tokens = training.micro_batch_size * training.seq_length
        schedule = PipelineSchedule(context, communicator, tokens)
        layout = BatchLayout(
            micro_batch_size=training.micro_batch_size,
            global_batch_size=training.micro_batch_size,  # of one replica: each has its own shards
            shard=context.row_shard,
            images=ImageLayout.of_context(context, plan.config.parallel.sequence_parallel),
        )
        return cls(kind, meta, context, schedule, stages, layout, plan.config.data.num_workers)

    def export(self, part: str, dataset: BlendedDataset) -> None:
        """Make the missing shards, one per replica at a time. A replica with less to do runs empty packs."""
        missing = self.context.broadcast_object(self.meta.missing_shards(self.kind.settings.out, part))
        num_shards, at_once = self.meta.num_shards(part), self.context.dp_size
        packs = counted(len(dataset), "pack")
        LOG.info(f"{part}: {len(missing)} of {counted(num_shards, 'shard')} to make, {packs} in all")
        rounds = [missing[first : first + at_once] for first in range(0, len(missing), at_once)]
        samples = [Dealt(one) for shards in rounds for one in self._samples(part, shards)]
        make, pin_memory = MicroBatches(dataset, self.layout), self.context.platform.is_cuda
        batches = read_ahead(make, samples, self.num_workers, pin_memory, ahead=MICROBATCHES_PER_STAGE)
        for number, shards in enumerate(rounds, 1):
            self._run(part, dataset, shards, batches)
            LOG.info(f"{part}: {min(number * at_once, len(missing))} of {counted(len(missing), 'shard')}")

    def _samples(self, part: str, shards: list[int]) -> list[list[int]]:
        """Return the packs of each micro-batch of this replica's shard.

        All replicas run as many micro-batches, of empty packs at the end: they may share the teacher's
        experts, or its layers.
        """
        numbers = [list(self.meta.shard_samples(part, shard)) for shard in shards]
        own = numbers[self.context.dp_rank] if self.context.dp_rank < len(shards) else []
        size = self.layout.micro_batch_size
        unit = size * self.context.microbatch_unit
        largest = max(map(len, numbers))
        own += [EMPTY] * (largest + -largest % unit - len(own))
        return [own[first : first + size] for first in range(0, len(own), size)]

    @torch.no_grad()
    def _run(
        self, part: str, dataset: BlendedDataset, shards: list[int], batches: Iterator[PackedBatch]
    ) -> None:
        """Make a shard on each replica. Raises NonFiniteError on every rank, and then leaves no file.

        `batches` yields the micro-batches of `_samples`.
        """
        shard = shards[self.context.dp_rank] if self.context.dp_rank < len(shards) else None
        is_writer = self.context.holds_last_stage and self.context.row_rank == 0
        path = (
            self.meta.shard_path(self.kind.settings.out, part, shard)
            if is_writer and shard is not None
            else None
        )
        written = () if path is None else self.meta.shard_samples(part, shard)
        digests = {sample: pack_digest(dataset[sample]) for sample in written}
        with self.kind.writer(path, self.meta) if path else nullcontext() as writer:
            collector = _Collector(self.kind, self.meta, self.context, digests, writer)
            not_finite, left = 0, len(self._samples(part, shards))
            while left:
                count = min(left, MICROBATCHES_PER_STAGE * self.context.pp_size)
                on_device = [batch.to(self.context.device) for batch in islice(batches, count)]
                sums = self.schedule.run(self.stages, on_device, collector, forward_only=True)
                not_finite, left = not_finite + int(sums[0]), left - count
            if not_finite:
                size = self.meta.samples_per_shard
                what = (
                    f"{self.meta.teacher}: the teacher's predictions of {not_finite} positions are not finite"
                )
                why = f"they are in {part} shards {', '.join(map(str, shards))} of {size} packs each"
                do = "check the teacher's weights, for example with `mkd parity`"
                raise NonFiniteError(what, why, do, code="model-not-finite")


@dataclass(frozen=True)
class _Collector:
    """Replaces the objective: stores the teacher's rows of every micro-batch on the last stage."""

    kind: CacheKind
    meta: CacheMeta
    context: ParallelContext
    digests: Mapping[int, bytes]
    writer: ShardWriter | None
    num_sums: int = 1

    def __call__(
        self, stage: DistillationStage, batch: PackedBatch, output: StageOutput
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Act as Megatron's loss callback without a gradient; report how many positions are not finite."""
        hidden = output.hidden
        columns, is_wrong = self.kind.columns(self.meta, stage, batch, output)
        positions = batch.loss_rows.cpu()
        if self.context.row_group is not None:
            columns, positions = self._whole_row(batch, columns, positions, self.context.row_group)
        if self.writer is not None:
            borders = np.searchsorted(
                positions.numpy(), np.arange(1, len(batch.sample_ids)) * self.meta.data["seq_length"]
            )
            packs = zip(*(np.split(column, borders) for column in columns), strict=True)
            for sample_id, rows in zip(batch.sample_ids, packs, strict=True):
                if sample_id in self.digests:
                    self.writer.add(sample_id, self.digests[sample_id], *rows)
        report = hidden.new_zeros(self.num_sums, dtype=torch.float64)
        report[0] = is_wrong.sum()
        return hidden.new_zeros(()), torch.zeros((), dtype=torch.int), report

    def _whole_row(
        self, batch: PackedBatch, columns: list[np.ndarray], positions: Tensor, group: dist.ProcessGroup
    ) -> tuple[list[np.ndarray], Tensor]:
        """Return rows and positions of the whole row, in order. All-gather over its `group`."""
        held = self.context.row_shard.rows(batch.cu_seqlens_padded)
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, (columns, held[positions]), group=group)
        positions = torch.cat([part[1] for part in parts])
        order = positions.argsort()
        return [
            np.concatenate(same)[order.numpy()] for same in zip(*(p[0] for p in parts), strict=True)
        ], positions[order]
