"""Dense float64 definition of the losses: the whole vocabulary in one process, plain autograd. Tests compare to it."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from mkd.losses.kd_objective import KDOutput


def dense_kd(
    student_logits: Tensor,  # [n, >= student_vocab_size], any float dtype; the gradient flows here
    teacher_logits: Tensor | None,  # [n, >= teacher_vocab_size]
    labels: Tensor,  # [n] int64
    loss_mask: Tensor,  # [n]
    *,
    student_vocab_size: int,
    teacher_vocab_size: int | None = None,
    kd_ratio: float = 0.5,
    temperature: float = 1.0,
    temperature_scaling: str = "squared",
    divergence: str = "forward_kl",
    jsd_beta: float = 0.5,
    mixed_kl_weight: float = 0.5,
) -> KDOutput:
    """The contract of `vocab_parallel_kd` on unsplit logits, in float64: CE always, KD whenever there is a teacher.

    `loss` has a graph; rows are picked by index, so that nothing in a masked row can matter.
    """
    rows = loss_mask.nonzero().squeeze(1)
    weight, label = loss_mask[rows].double(), labels[rows]
    student = student_logits[rows, :student_vocab_size].double()
    ce = (weight * functional.cross_entropy(student, label, reduction="none")).sum()
    if teacher_logits is None:
        assert kd_ratio == 0, "a KD term needs a teacher"
        return KDOutput(ce, ce.detach(), None, None, None, None, rows.new_tensor(len(rows)))
    shared = min(student_vocab_size, teacher_vocab_size)
    teacher = teacher_logits[rows, :shared].double()
    log_p_s = (student[:, :shared] / temperature).log_softmax(dim=1)
    log_p_t = (teacher / temperature).log_softmax(dim=1)
    scale = {"squared": temperature**2, "none": 1.0}[temperature_scaling]
    rows_kd = _divergence(divergence, log_p_s, log_p_t, jsd_beta, mixed_kl_weight)
    kd = scale * (weight * rows_kd).sum()
    log_p = teacher.log_softmax(dim=1)
    agree = student.gather(1, teacher.argmax(dim=1, keepdim=True)).squeeze(1) == student[:, :shared].amax(
        dim=1
    )
    return KDOutput(
        loss=(1 - kd_ratio) * ce + kd_ratio * kd,
        ce=ce.detach(),
        kd=kd.detach(),
        teacher_ce=(weight * functional.nll_loss(log_p, label, reduction="none")).sum(),
        teacher_entropy=-(weight * (log_p.exp() * log_p).sum(dim=1)).sum(),
        top1_agreement=(weight * agree).sum(),
        num_loss_tokens=torch.count_nonzero(loss_mask),
    )


def _divergence(
    name: str, log_p_s: Tensor, log_p_t: Tensor, jsd_beta: float, mixed_kl_weight: float
) -> Tensor:
    """[n], from log-probabilities [n, v]."""
    forward, reverse = _kl(log_p_t, log_p_s), _kl(log_p_s, log_p_t)
    if name == "jsd" and 0.0 < jsd_beta < 1.0:
        log_q = torch.logaddexp(log_p_t + math.log(jsd_beta), log_p_s + math.log(1.0 - jsd_beta))
        return jsd_beta * _kl(log_p_t, log_q) + (1.0 - jsd_beta) * _kl(log_p_s, log_q)
    weight = {"forward_kl": 1.0, "reverse_kl": 0.0, "mixed_kl": mixed_kl_weight, "jsd": 1.0 - jsd_beta}[name]
    return weight * forward + (1.0 - weight) * reverse


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(dim=1)
