"""How much each teacher counts in each pack: as configured, or by what the teachers themselves say of the pack.

A weight belongs to a pack, not to a micro-batch or a step, so that it is the same under every layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.config.schema import KDConfig
from mkd.data.aligned.teacher_batch import TeacherBatch
from mkd.data.batch import PackedBatch
from mkd.losses.scores import TokenScores, token_scores
from mkd.models.language_model import LanguageModel
from mkd.models.stage import DistillationStage
from mkd.parallel.context import ParallelContext
from mkd.parallel.exchange import exchange_rows
from mkd.train.teachers.teacher_loss import TeacherLoss
from mkd.xtoken.segments import sum_by

METRICS = {
    "ce": lambda scores: -scores.label,
    "entropy": lambda scores: scores.entropy,
    "confidence": lambda scores: 1.0 - scores.highest.exp(),
}


def pack_weights(
    kd: KDConfig,
    context: ParallelContext,
    teachers: Sequence[TeacherLoss],
    stage: DistillationStage,
    batch: PackedBatch,
    teacher_hiddens: Sequence[Tensor],  # each [t_i(/tp), 1, h_i], final
) -> Tensor:  # [teachers, k] fp32, k packs; every column adds up to 1
    """`static`: the configured shares. `select`: 1 for the teacher with the lowest cross entropy, 0 for the others.

    Otherwise softmax(ln share - metric / temperature). A metric is summed over the teacher's tokens of the pack and divided
    by the student's tokens of the same text, so that teachers with different tokenizers compare. A teacher that is compared
    on nothing of a pack has no weight there, unless none is.
    """
    shares = torch.tensor([teacher.share for teacher in teachers], device=context.device)
    num_packs = len(batch.sample_ids)
    if len(teachers) == 1 or not kd.weighs_packs:
        return shares[:, None].expand(-1, num_packs)
    metric = METRICS["ce" if kd.selects_teacher else kd.teacher_weighting]
    values = torch.stack(
        [
            _pack_metric(
                metric,
                context,
                one,
                model,
                teacher_hidden,
                batch,
                batch.teachers[i] if batch.teachers else None,
            )
            for i, (one, model, teacher_hidden) in enumerate(
                zip(teachers, stage.teachers, teacher_hiddens, strict=True)
            )
        ]
    )
    if context.cp_size > 1:
        dist.all_reduce(values, group=context.groups.cp)
    metrics, covered = values.unbind(dim=2)
    says_nothing = (covered == 0) & (covered > 0).any(dim=0)  # of this pack, unlike another teacher
    per_token = (metrics / covered.clamp(min=1)).masked_fill(says_nothing, torch.inf)
    if kd.selects_teacher:
        return torch.nn.functional.one_hot(per_token.argmin(dim=0), len(teachers)).t().float()
    return torch.softmax(shares.log()[:, None] - per_token / kd.teacher_weighting_temperature, dim=0)


@torch.no_grad()
def _pack_metric(
    metric,
    context: ParallelContext,
    teacher: TeacherLoss,
    model: LanguageModel,
    teacher_hidden: Tensor,
    batch: PackedBatch,
    own: TeacherBatch | None,
) -> Tensor:
    """[k, 2] fp32 of this context-parallel rank: sum of the metric over the teacher's tokens, student tokens covered."""
    hidden, num_packs = teacher_hidden.squeeze(1), len(batch.sample_ids)
    common = dict(tp_group=context.tp_group, sequence_parallel=model.config.sequence_parallel)
    if own is None:
        rows = batch.loss_rows
        packs, labels, real = rows // (batch.tokens.shape[1] // num_packs), batch.labels[0, rows], None
        covered = sum_by(packs, torch.ones(len(rows), device=context.device), num_packs)
    else:
        side, student = own.chunks.teacher, own.chunks.student
        packs = own.chunks.packs.repeat_interleave(side.offsets.diff(), output_size=len(side.rows))
        rows, labels, real = (
            side.rows,
            teacher.vocabulary.teacher_places[side.labels],
            teacher.vocabulary.teacher_real,
        )
        covered = sum_by(own.chunks.packs, student.offsets.diff().float(), num_packs)
        common["exchange"] = None
        if side.exchange is not None:
            common["exchange"] = lambda whole: exchange_rows(
                whole,
                side.exchange.send_rows,
                side.exchange.send_counts,
                side.exchange.receive_counts,
                context.groups.cp,
            )
    scores: TokenScores = model.use_head(
        lambda weight: token_scores(
            hidden,
            weight,
            rows,
            labels,
            vocab_size=model.shape.vocab_size if real is None else None,
            real=None if real is None else real[teacher.vocabulary.rank],
            **common,
        )
    )
    return torch.stack([sum_by(packs, metric(scores), num_packs), covered], dim=1)
