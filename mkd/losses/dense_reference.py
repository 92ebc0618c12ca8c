"""Dense float64 definition of the losses: the whole vocabulary in one process, plain autograd.

Tests compare with it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mkd.losses.kd_objective import KDObjective, KDOutput


def dense_kd(
    student_logits: Tensor,  # [n, >= student_vocab_size], any float dtype; the gradient flows here
    teacher_logits: Tensor | None,  # [n, >= teacher_vocab_size]
    labels: Tensor,  # [n] int64
    loss_mask: Tensor,  # [n]
    objective: KDObjective,
) -> KDOutput:
    """Compute `vocab_parallel_kd` on unsplit logits, in float64: CE always, KD whenever there is a teacher.

    `loss` has a graph. Rows are picked by index, so that nothing in a masked row can matter.
    """
    ratio, temperature = objective.kd_ratio, objective.temperature
    rows = loss_mask.nonzero().squeeze(1)
    weight, label = loss_mask[rows].double(), labels[rows]
    student = student_logits[rows, : objective.student_vocab_size].double()
    row_ce = functional.cross_entropy(student, label, reduction="none")
    ce, plain_ce = (weight * row_ce).sum(), row_ce.detach().sum()
    if teacher_logits is None:
        assert ratio == 0, "a KD term needs a teacher"
        return KDOutput(ce, ce.detach(), None, None, None, None, rows.new_tensor(len(rows)), plain_ce)
    shared = objective.num_shared_ids
    teacher = teacher_logits[rows, :shared].double()
    log_p_s = (student[:, :shared] / temperature).log_softmax(dim=1)
    log_p_t = (teacher / temperature).log_softmax(dim=1)
    kd = objective.scale * (weight * objective.divergence.plain(log_p_t, log_p_s)).sum()
    log_p = teacher.log_softmax(dim=1)
    top = teacher.argmax(dim=1, keepdim=True)
    agree = student.gather(1, top).squeeze(1) == student[:, :shared].amax(dim=1)
    return KDOutput(
        loss=(1 - ratio) * ce + ratio * kd,
        ce=ce.detach(),
        kd=kd.detach(),
        teacher_ce=(weight * functional.nll_loss(log_p, label, reduction="none")).sum(),
        teacher_entropy=-(weight * (log_p.exp() * log_p).sum(dim=1)).sum(),
        top1_agreement=(weight * agree).sum(),
        num_loss_tokens=torch.count_nonzero(loss_mask),
        plain_ce=plain_ce,
    )
