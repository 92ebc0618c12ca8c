"""The weight of each teacher in each pack: as configured, or by the teachers' own predictions of the pack.

A weight belongs to a pack, not to a micro-batch or a step, so it is the same under every layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.config.schema import KDConfig
from mkd.train.teachers.base import LossInput, ScoringTeacher, Teacher
from mkd.xtoken.segments import sum_by

METRICS = {
    "ce": lambda scores: -scores.label,
    "entropy": lambda scores: scores.entropy,
    "confidence": lambda scores: 1.0 - scores.highest.exp(),
}
"""Setting `teacher_weighting` -> metric [n] of a teacher's `TokenScores`; lower is better."""


def pack_weights(kd: KDConfig, teachers: Sequence[Teacher], given: LossInput) -> dict[str, Tensor]:
    """Return teacher -> [k] fp32, its weight in each of k packs. In every pack the weights add up to 1.

    `static`: the configured shares. `select`: 1 for the teacher with the lowest cross entropy, 0 for the
    others. Otherwise softmax(ln share - metric / temperature).

    A metric is summed over the teacher's tokens of the pack and divided by the student's tokens of the same
    text, so that teachers with different tokenizers are comparable. A teacher that is compared on nothing in
    a pack has weight 0 there, unless this holds for all teachers.
    """
    device = given.context.device
    if len(teachers) < 2 or not kd.weighs_packs:
        return {one.name: torch.full((given.num_packs,), one.share, device=device) for one in teachers}
    per_token = _metric_per_token("ce" if kd.selects_teacher else kd.teacher_weighting, teachers, given)
    if kd.selects_teacher:
        weights = torch.nn.functional.one_hot(per_token.argmin(dim=0), len(teachers)).t().float()
    else:
        shares = torch.tensor([one.share for one in teachers], device=device)
        weights = torch.softmax(shares.log()[:, None] - per_token / kd.teacher_weighting_temperature, dim=0)
    return dict(zip((one.name for one in teachers), weights, strict=True))


@torch.no_grad()
def _metric_per_token(metric: str, teachers: Sequence[ScoringTeacher], given: LossInput) -> Tensor:
    """Return the metric of each pack per student token, [teachers, k] fp32.

    It is inf for a teacher without tokens in the pack. Communication: one all-reduce SUM over context
    parallelism; no backward.
    """
    sums = []
    for teacher in teachers:
        found = teacher.pack_scores(given)
        values = sum_by(found.packs, METRICS[metric](found.scores), given.num_packs)
        sums.append(torch.stack([values, found.covered], dim=1))
    total = torch.stack(sums)  # [teachers, k, 2]
    if given.context.row_group is not None:
        dist.all_reduce(total, group=given.context.row_group)
    values, covered = total.unbind(dim=2)
    is_silent = (covered == 0) & (covered > 0).any(dim=0)  # another teacher has tokens of the pack
    return (values / covered.clamp(min=1)).masked_fill(is_silent, torch.inf)
