"""The export of a teacher's top-k log-probabilities: `mkd topk`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mkd.checkpoint.hf.hf_hub import resolve_hf
from mkd.data.batch import PackedBatch
from mkd.data.stored.cache_meta import TopKMeta
from mkd.data.stored.teacher_topk import TopKWriter
from mkd.errors import UsageError
from mkd.kinds.stored.topk_setup import temperature_of
from mkd.losses.stored.topk_select import vocab_parallel_topk
from mkd.models.language_model import LanguageModel
from mkd.models.stage import DistillationStage, StageOutput
from mkd.parallel.context import ParallelContext
from mkd.plan.models.model_shape import ModelShape
from mkd.run.stored.cache_description import ExportPlan, ExportSettings, common_description
from mkd.train.teachers.base import loss_row_logits


@dataclass(frozen=True)
class TopKExport:
    """The settings of an export of predictions; see `CacheKind`."""

    settings: ExportSettings
    k: int
    logprob_dtype: str  # float16 or float32

    def check(self, plan: ExportPlan) -> None:
        vocab_size = _vocab_size(plan)
        if not 0 < self.k <= vocab_size:
            what = f"--k {self.k} is not from 1 to {vocab_size}"
            why = "that many ids have a probability"
            raise UsageError(what, why, "128 is enough for most vocabularies", code="out-of-range")

    def describe(self, plan: ExportPlan, parts: dict[str, int]) -> TopKMeta:
        return TopKMeta(
            k=self.k,
            temperature=temperature_of(plan.config),
            logprob_dtype=self.logprob_dtype,
            vocab_size=_vocab_size(plan),
            **common_description(plan, self.settings, parts),
        )

    def prepare(self, models: list[LanguageModel], meta: TopKMeta, context: ParallelContext) -> TopKMeta:
        return meta

    def writer(self, path: Path, meta: TopKMeta) -> TopKWriter:
        return TopKWriter(path, meta)

    def columns(
        self, meta: TopKMeta, stage: DistillationStage, batch: PackedBatch, output: StageOutput
    ) -> tuple[list[np.ndarray], Tensor]:
        top = vocab_parallel_topk(
            loss_row_logits(stage.student, output.hidden, batch.loss_rows),
            batch.labels[0, batch.loss_rows],
            meta.k,
            tp_group=stage.student.context.tp_group,
            vocab_size=meta.vocab_size,
            temperature=meta.temperature,
        )
        metrics = torch.stack([top.ce, top.entropy], dim=1)
        columns = [tensor.cpu().numpy() for tensor in (top.ids, top.logprobs, metrics)]
        return columns, (~top.logprobs.isfinite()).any(dim=1)


def _vocab_size(plan: ExportPlan) -> int:
    """Return the number of ids that both models have."""
    of_teacher, student = plan.teacher.source.shape.vocab_size, plan.config.student.hf
    if not student:
        return of_teacher
    return min(of_teacher, ModelShape.from_hf_dir(resolve_hf(student)).vocab_size)
