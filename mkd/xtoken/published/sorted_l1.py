"""uld, the L1 distance of sorted probabilities (Boizard et al. 2024, arXiv 2402.12030)."""

from __future__ import annotations

import torch
from torch import Tensor

from mkd.xtoken.loss_call import LossCall
from mkd.xtoken.published.chunk_distributions import chunk_distributions, write_chain_gradient
from mkd.xtoken.slices import ChunkSlice


def uld(student: Tensor, teacher: Tensor, scale: Tensor | None, piece: ChunkSlice, call: LossCall) -> Tensor:
    """Return values [c]; with `scale` [c] overwrite the student's logits with scale * dL/d(z/T)."""
    ours, theirs = chunk_distributions(student, teacher, piece, call)
    masses = ours.logs.exp_()
    values, signs = sorted_l1(masses, theirs.logs.exp_())
    if scale is not None:
        by_log = masses.mul_(signs)
        total = by_log.sum(dim=1)
        of_base = by_log.sub_(ours.base.exp() * total[:, None])
        write_chain_gradient(student, of_base, total, ours, scale, piece, call)
    return values


def sorted_l1(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sum of |s - t| over sorted rows [c, a] and [c, b], filled with 0; its derivative by s)."""
    ours, order = student.sort(dim=1, descending=True)
    theirs = teacher.sort(dim=1, descending=True).values
    shared = min(ours.shape[1], theirs.shape[1])
    difference = torch.cat([ours[:, :shared] - theirs[:, :shared], ours[:, shared:]], dim=1)
    values = difference.abs().sum(dim=1) + theirs[:, shared:].abs().sum(dim=1)
    return values, torch.zeros_like(student).scatter_(1, order, difference.sign())
