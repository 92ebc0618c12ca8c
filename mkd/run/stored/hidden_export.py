"""The export of a teacher's final hidden states and of its head: `mkd hidden`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mkd.data.batch import PackedBatch
from mkd.data.corpus.known_files import sha256_of_file
from mkd.data.stored.cache_meta import HiddenMeta
from mkd.data.stored.teacher_hidden import HEAD_FILE, HiddenWriter, as_bytes, write_head
from mkd.losses.lm_head import whole_sequence
from mkd.models.language_model import LanguageModel
from mkd.models.stage import DistillationStage, StageOutput
from mkd.parallel.context import ParallelContext
from mkd.run.stored.cache_description import ExportPlan, ExportSettings, common_description


@dataclass(frozen=True)
class HiddenExport:
    """The settings of an export of hidden states; see `CacheKind`."""

    settings: ExportSettings

    def check(self, plan: ExportPlan) -> None:
        """Accept every teacher."""

    def describe(self, plan: ExportPlan, parts: dict[str, int]) -> HiddenMeta:
        source = plan.teacher.source
        return HiddenMeta(
            hidden_size=source.shape.hidden_size,
            states_dtype="bfloat16" if plan.config.training.bf16 else "float32",
            config=json.loads((source.assets / "config.json").read_text(encoding="utf-8")),
            vocab_size=source.shape.vocab_size,
            **common_description(plan, self.settings, parts),
        )

    def prepare(self, models: list[LanguageModel], meta: HiddenMeta, context: ParallelContext) -> HiddenMeta:
        """Write the head, unless it is there, and its hash into the description. Collective."""
        out, digest = self.settings.out, meta.head_sha256
        path, last = out / HEAD_FILE, models[-1]
        if last.post_process and context.is_first_replica:
            weight = _whole_head(last, context)
            if weight is not None and not (path.is_file() and digest and sha256_of_file(path) == digest):
                digest = write_head(out, weight[: meta.vocab_size])
                replace(meta, head_sha256=digest).write(out)
        digests: list[str] = [""] * context.world_size
        dist.all_gather_object(digests, digest)
        (digest,) = {one for one in digests if one != meta.head_sha256} or {meta.head_sha256}
        return replace(meta, head_sha256=digest)

    def writer(self, path: Path, meta: HiddenMeta) -> HiddenWriter:
        return HiddenWriter(path, meta)

    def columns(
        self, meta: HiddenMeta, stage: DistillationStage, batch: PackedBatch, output: StageOutput
    ) -> tuple[list[np.ndarray], Tensor]:
        model = stage.student
        groups = model.pg_collection.tp, model.config.sequence_parallel
        states = whole_sequence(output.hidden.squeeze(1), *groups).index_select(0, batch.loss_rows)
        return [as_bytes(states)], (~states.isfinite()).any(dim=1)


@torch.no_grad()
def _whole_head(model: LanguageModel, context: ParallelContext) -> Tensor | None:
    """Return the head [v, h] on the CPU of the first tensor-parallel rank, None on the others.

    Communication: gather over tensor parallelism.
    """
    weight = model.head_weight().contiguous()
    if context.tp_size == 1:
        return weight.cpu()
    parts = [torch.empty_like(weight) for _ in range(context.tp_size)]
    dist.all_gather(parts, weight, group=context.tp_group)
    return torch.cat([part.cpu() for part in parts]) if context.tp.rank == 0 else None
