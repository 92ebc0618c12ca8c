"""Dense float64 definition of the top-k loss: the whole vocabulary in one process, plain autograd.

Tests compare with it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def dense_topk_kd(
    student_logits: Tensor,  # [n, >= student_vocab_size], any float dtype; the gradient flows here
    teacher_ids: Tensor,  # [n, k] int64
    teacher_logprobs: Tensor,  # [n, k], at `temperature`
    labels: Tensor,  # [n] int64
    loss_mask: Tensor,  # [n]
    *,
    student_vocab_size: int,
    teacher_vocab_size: int | None = None,
    kd_ratio: float = 0.5,
    temperature: float = 1.0,
    temperature_scaling: str = "squared",
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (loss, CE sum, KD sum) of `vocab_parallel_topk_kd` on unsplit logits, in float64.

    Only the loss has a graph.
    """
    rows = loss_mask.nonzero().squeeze(1)
    weight, ids = loss_mask[rows].double(), teacher_ids[rows]
    student = student_logits[rows, :student_vocab_size].double()
    ce = (weight * functional.cross_entropy(student, labels[rows], reduction="none")).sum()
    shared = min(student_vocab_size, teacher_vocab_size or student_vocab_size)
    log_p_s = (student[:, :shared] / temperature).log_softmax(dim=1)
    log_p_t = teacher_logprobs[rows].double()
    kl = (log_p_t.exp() * (log_p_t - log_p_s.gather(1, ids))).sum(dim=1)
    if ids.shape[1] < shared:
        outside = torch.ones_like(log_p_s, dtype=torch.bool).scatter(1, ids, False)
        log_rest_s = log_p_s.masked_fill(~outside, float("-inf")).logsumexp(dim=1)
        rest = 1.0 - log_p_t.exp().sum(dim=1)
        kl = kl + torch.xlogy(rest, rest) - rest * log_rest_s
    scale = {"squared": temperature**2, "none": 1.0}[temperature_scaling]
    kd = scale * (weight * kl).sum()
    return (1 - kd_ratio) * ce + kd_ratio * kd, ce.detach(), kd.detach()
