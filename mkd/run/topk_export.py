"""Runs a teacher over the packs of a run and stores its top-k log-probabilities: `tools/export_teacher_topk.py`.

The teacher takes the student's place in the usual plan, data and schedule, so that it sees exactly the packs of the run and
runs under every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mkd.checkpoint.hf.hf_reader import resolve_hf
from mkd.config.models import teacher_names
from mkd.config.schema import (
    CheckpointConfig,
    Config,
    KDConfig,
    LogConfig,
    OptimizerConfig,
    StudentConfig,
)
from mkd.data.batch import PackedBatch, collate
from mkd.data.stored.teacher_topk import ShardWriter, TopKMeta, pack_digest
from mkd.errors import DataError, NonFiniteError, UsageError
from mkd.losses.stored.topk_select import vocab_parallel_topk
from mkd.models.builder import build_chunks, join_stages
from mkd.models.stage import DistillationStage, StageOutput
from mkd.models.transformer_config import ModelOptions
from mkd.parallel.context import ParallelContext
from mkd.parallel.zigzag import context_parallel_rows
from mkd.plan.model_shape import ModelShape
from mkd.platform import Platform
from mkd.run.build_data import build_data
from mkd.run.build_engine import build_schedule, load_weights
from mkd.run.preflight import require_same_tokenizer
from mkd.run.run_plan import Plan, plan_run
from mkd.run.setup import join
from mkd.run.stored_teacher import data_settings, temperature_of, weights_fingerprint
from mkd.train.schedule import PipelineSchedule
from mkd.train.teachers.stored import loss_row_logits


@dataclass(frozen=True)
class ExportSettings:
    """What an export has beside the settings of the run."""

    out: Path
    k: int
    logprob_dtype: str  # float16 or float32
    samples_per_shard: int


def export_teacher(
    config: Config, settings: ExportSettings, platform: Platform, world_size: int, say: Callable[[str], None]
) -> TopKMeta:
    """Write what is missing of the cache `settings.out`, of the teacher of `config` and all its data. Collective.

    Raises the errors of a training run, and DataError when the folder holds another cache.
    """
    plan = plan_run(teacher_as_student(config, world_size), world_size)
    if len(config.teachers) > 1:
        say(
            f"{len(config.teachers)} teachers are configured: the first, {teacher_names(config.teachers)[0]}, is exported"
        )
    vocab_size = min(
        plan.student.shape.vocab_size, _student_vocab_size(config) or plan.student.shape.vocab_size
    )
    if not 0 < settings.k <= vocab_size:
        what = f"--k {settings.k} is not from 1 to {vocab_size}"
        raise UsageError(
            what,
            "that many ids have a probability",
            "128 is enough for most vocabularies",
            code="topk-not-in-vocabulary",
        )
    _make_folder(settings.out)
    context = join(plan, platform)
    train_set, valid_set = build_data(plan, context)
    datasets = {"train": train_set} | ({} if valid_set is None else {"valid": valid_set})
    meta = _describe(
        plan, settings, vocab_size, {name: len(dataset) for name, dataset in datasets.items()}, context
    )
    exporter = _Exporter.build(plan, settings.out, meta, context)
    for part, dataset in datasets.items():
        exporter.export(part, dataset, say)
    context.leave()
    return meta


def teacher_as_student(config: Config, world_size: int) -> Config:
    """The run in which the teacher is alone, with the tokenizer and so the packs of `config`."""
    if not config.teachers or not (config.teachers[0].hf or config.teachers[0].load):
        raise UsageError(
            "no teacher is given",
            "its predictions are what is exported",
            "give --teacher-hf DIR",
            code="teacher-missing",
        )
    teacher = config.teachers[0]
    tokenizer = config.data.tokenizer_model or config.student.hf or teacher.hf
    global_batch_size = (
        None  # one micro-batch on every data-parallel rank; interleaving wants one for every pipeline rank
    )
    if (
        config.parallel.num_virtual_stages_per_pipeline_rank or 1
    ) > 1 or config.parallel.num_layers_per_virtual_pipeline_stage:
        parallel = config.parallel
        replica = parallel.tensor_model_parallel_size * parallel.context_parallel_size
        global_batch_size = config.training.micro_batch_size * world_size // replica
    return replace(
        config,
        student=StudentConfig(hf=teacher.hf, load=teacher.load, pipeline_layout=teacher.pipeline_layout),
        teachers=(),
        kd=KDConfig(kd_ratio=0.0, kd_temperature=temperature_of(config)),
        data=replace(
            config.data,
            tokenizer_model=tokenizer,
            eval_multiple_choice=(),
            eval_completions=(),
            eval_num_fewshot=0,
        ),
        training=replace(
            config.training, train_iters=1, eval_interval=None, global_batch_size=global_batch_size
        ),
        optimizer=OptimizerConfig(),
        checkpoint=CheckpointConfig(),
        log=LogConfig(name=config.log.name, log_dir=config.log.log_dir or config.checkpoint.save),
    )


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make --out {out}: {error}",
            "the cache is written there",
            "choose another one",
            code="out-not-writable",
        ) from error


def _student_vocab_size(config: Config) -> int | None:
    return ModelShape.from_hf_dir(resolve_hf(config.student.hf)).vocab_size if config.student.hf else None


def _describe(
    plan: Plan, settings: ExportSettings, vocab_size: int, parts: dict[str, int], context: ParallelContext
) -> TopKMeta:
    """The description of the cache, the same on every rank, written unless it is there. Raises DataError for another one."""
    outcome: TopKMeta | Exception | None = None
    if context.rank == 0:
        try:
            outcome = _write_description(plan, settings, vocab_size, parts)
        except Exception as error:  # whatever it is: the others wait
            outcome = error
    outcome = context.broadcast_object(outcome)
    if isinstance(outcome, Exception):
        outcome.on_all_ranks = True
        raise outcome
    return outcome


def _write_description(
    plan: Plan, settings: ExportSettings, vocab_size: int, parts: dict[str, int]
) -> TopKMeta:
    tokenizer = plan.tokenizers.student
    require_same_tokenizer(tokenizer, plan.student)
    meta = TopKMeta(
        k=settings.k,
        temperature=plan.config.kd.kd_temperature,
        logprob_dtype=settings.logprob_dtype,
        vocab_size=vocab_size,
        teacher=str(plan.student.load or plan.student.assets),
        weights_fingerprint=weights_fingerprint(plan.student),
        vocabulary_fingerprint=tokenizer.vocabulary_fingerprint,
        data=data_settings(plan.config),
        parts=parts,
        samples_per_shard=settings.samples_per_shard,
    )
    if (settings.out / "meta.json").exists():
        found = TopKMeta.read(settings.out)
        differing = [
            name for name in vars(meta) if name != "teacher" and getattr(found, name) != getattr(meta, name)
        ]
        if differing:
            raise DataError(
                f"{settings.out} holds another teacher cache: {', '.join(differing)} differ",
                "an export only goes on with the very same teacher, data and settings",
                "choose another --out, or remove the folder",
                code="teacher-cache-of-another-run",
            )
    meta.write(settings.out)
    return meta


@dataclass(frozen=True)
class _Exporter:
    """The teacher on its schedule, and the folder."""

    out: Path
    meta: TopKMeta
    context: ParallelContext
    schedule: PipelineSchedule
    stages: list[DistillationStage]
    micro_batch_size: int  # packs

    @classmethod
    def build(cls, plan: Plan, out: Path, meta: TopKMeta, context: ParallelContext) -> _Exporter:
        training = plan.config.training
        options = ModelOptions(
            dtype=torch.bfloat16 if training.bf16 else torch.float32,
            sequence_parallel=plan.config.parallel.sequence_parallel,
            deterministic=training.deterministic_mode,
        )
        models = build_chunks(plan.student.shape, plan.student_layout, options, context)
        load_weights(models, plan.student, context)
        stages = [stage.eval() for stage in join_stages(models)]
        schedule = build_schedule(plan, models, options, context)
        return cls(out, meta, context, schedule, stages, plan.batch.micro_batch_size)

    def export(self, part: str, dataset, say: Callable[[str], None]) -> None:
        """Data-parallel ranks take the missing shards in turn; one that has none left runs empty packs with the others."""
        missing = self.context.broadcast_object(self.meta.missing_shards(self.out, part))
        say(
            f"{part}: {len(missing)} of {self.meta.num_shards(part)} shards to make, {len(dataset)} packs in all"
        )
        for first in range(0, len(missing), self.context.dp_size):
            self._run(part, dataset, missing[first : first + self.context.dp_size])
            say(f"{part}: {min(first + self.context.dp_size, len(missing))} of {len(missing)} shards")

    @torch.no_grad()
    def _run(self, part: str, dataset, shards: list[int]) -> None:
        """One shard on each of the first data-parallel ranks. Raises NonFiniteError on every rank, and leaves no file then."""
        shard = shards[self.context.dp_rank] if self.context.dp_rank < len(shards) else None
        packs = [] if shard is None else [dataset[sample] for sample in self.meta.shard_samples(part, shard)]
        digests = {pack.sample_id: pack_digest(pack) for pack in packs}
        unit = self.micro_batch_size * (self.context.pp_size if self.context.virtual_stages > 1 else 1)
        packs += [dataset.empty_pack()] * (-len(packs) % unit if packs else unit)
        batches = [
            collate(packs[i : i + self.micro_batch_size])
            .context_parallel_shard(self.context.cp_rank, self.context.cp_size)
            .to(self.context.device)
            for i in range(0, len(packs), self.micro_batch_size)
        ]
        is_writer = self.context.holds_last_stage and self.context.tp_rank == self.context.cp_rank == 0
        path = None if shard is None else self.meta.shard_path(self.out, part, shard)
        with ShardWriter(path, self.meta) if is_writer and path else nullcontext() as writer:
            collector = _Collector(self.meta, self.context, digests, writer)
            not_finite = self.schedule.run(self.stages, batches, collector, forward_only=True)[0]
            if not_finite:
                raise NonFiniteError(
                    f"{self.meta.teacher}: the teacher's predictions of {int(not_finite)} positions are not finite",
                    f"they are in {part} shards {', '.join(map(str, shards))} of {self.meta.samples_per_shard} packs each",
                    "check the teacher's weights, for example with tools/check_parity.py",
                    code="teacher-not-finite",
                )


@dataclass(frozen=True)
class _Collector:
    """Stands where the objective stands in training: stores the teacher's rows of every micro-batch of the last stage."""

    meta: TopKMeta
    context: ParallelContext
    digests: Mapping[int, bytes]
    writer: ShardWriter | None
    num_sums: int = 1

    def __call__(
        self, stage: DistillationStage, batch: PackedBatch, output: StageOutput
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Megatron's loss callback, with nothing to differentiate; reports the positions whose predictions are not finite."""
        hidden = output.hidden
        top = vocab_parallel_topk(
            loss_row_logits(stage.student, hidden, batch.loss_rows),
            batch.labels[0, batch.loss_rows],
            self.meta.k,
            tp_group=self.context.tp_group,
            vocab_size=self.meta.vocab_size,
            temperature=self.meta.temperature,
        )
        metrics = torch.stack([top.ce, top.entropy], dim=1)
        columns = [tensor.cpu().numpy() for tensor in (top.ids, top.logprobs, metrics)]
        positions = batch.loss_rows.cpu()
        if self.context.cp_size > 1:
            columns, positions = self._whole_row(batch, columns, positions)
        if self.writer is not None:
            borders = np.searchsorted(
                positions.numpy(), np.arange(1, len(batch.sample_ids)) * self.meta.data["seq_length"]
            )
            packs = zip(*(np.split(column, borders) for column in columns), strict=True)
            for sample_id, rows in zip(batch.sample_ids, packs, strict=True):
                if sample_id in self.digests:
                    self.writer.add(sample_id, self.digests[sample_id], *rows)
        report = hidden.new_zeros(self.num_sums, dtype=torch.float64)
        report[0] = (~top.logprobs.isfinite()).any(dim=1).sum()
        return hidden.new_zeros(()), torch.zeros((), dtype=torch.int), report

    def _whole_row(
        self, batch: PackedBatch, columns: list[np.ndarray], positions: Tensor
    ) -> tuple[list[np.ndarray], Tensor]:
        """Rows and positions of all context-parallel ranks, in the order of the positions (all-gather over CP)."""
        held = context_parallel_rows(batch.cu_seqlens_padded, self.context.cp_rank, self.context.cp_size)
        parts: list = [None] * self.context.cp_size
        dist.all_gather_object(parts, (columns, held[positions]), group=self.context.groups.cp)
        positions = torch.cat([part[1] for part in parts])
        order = positions.argsort()
        return [
            np.concatenate(same)[order.numpy()] for same in zip(*(p[0] for p in parts), strict=True)
        ], positions[order]
