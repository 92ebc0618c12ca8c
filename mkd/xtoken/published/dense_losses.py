"""gold and h_kl: a divergence on the common tokens plus the sorted L1 distance of the others. uld: of all.

    L = w_c * D({common tokens, rest} of the chunk distributions)
      + w_u * sorted L1(uncommon tokens of the chunk distributions)

Sources: GOLD, Patino et al. 2025; H-KL, arXiv 2605.21699; ULD, Boizard et al. 2024 (arXiv 2402.12030). gold
and h_kl are published with a KL of the parts of two distributions that are on the common tokens. These parts
do not sum to 1, so that KL goes negative. Here a rest bucket makes both whole. It holds 1 - the sum over
common tokens, missing chain probability included. Where one model has no rest, the other is conditioned on
the common tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mkd.xtoken.chunks import MANY_TO_ONE, ONE_TO_MANY, ONE_TO_ONE
from mkd.xtoken.loss_call import FLOOR, LossCall, log_rest
from mkd.xtoken.published.chunk_distributions import (
    ChunkDistribution,
    chunk_distributions,
    write_chain_gradient,
)
from mkd.xtoken.slices import ChunkSlice


def hybrid(
    student: Tensor, teacher: Tensor, scale: Tensor | None, piece: ChunkSlice, call: LossCall
) -> Tensor:
    """Return values [c] from the logits [n, w_s], [m, w_t].

    With `scale` [c] overwrite the student's with scale * dL/d(z/T).
    """
    vocabulary = call.vocabulary
    weights = call.settings.hybrid_weights(vocabulary.num_common / vocabulary.num_teacher_rows)
    ours, theirs = chunk_distributions(student, teacher, piece, call)
    s = _Classes.of(ours, vocabulary.paired_student, vocabulary.student_real, piece, call)
    t = _Classes.of(theirs, vocabulary.paired_teacher, vocabulary.teacher_real, piece, call)
    divergence = call.settings.divergence
    of_common, of_rest = divergence.parts(t.common, s.common), divergence.parts(t.rest, s.rest)
    sums = torch.stack([a.sum(dim=1) + b for a, b in zip(of_common, of_rest, strict=True)])
    masses = ours.logs.exp_().masked_fill_(~s.uncommon, 0.0)
    their_masses = theirs.logs.exp_().masked_fill_(~t.uncommon, 0.0)
    distance, signs = sorted_l1(masses, their_masses)
    if scale is not None:
        of_base, of_chain = _divergence_gradient(ours, s, t, sums, call)
        by_log = masses.mul_(signs)  # d distance / d ln P, by columns
        total = by_log.sum(dim=1)
        by_log.sub_(ours.base.exp() * total[:, None])
        of_base.mul_(weights[0]).add_(by_log, alpha=weights[1])
        of_chain = weights[0] * of_chain + weights[1] * total
        write_chain_gradient(student, of_base, of_chain, ours, scale, piece, call)
    return weights[0] * divergence.value(sums) + weights[1] * distance


@dataclass(frozen=True)
class _Classes:
    """Logarithms of one model's masses."""

    common: Tensor  # [c, k] of the common tokens
    rest: Tensor  # [c]; FLOOR, which counts nothing, if there is none
    uncommon: Tensor  # [tp * w] bool, real columns in no pair
    has_rest: bool

    @classmethod
    def of(
        cls, side: ChunkDistribution, paired: Tensor, real: Tensor, piece: ChunkSlice, call: LossCall
    ) -> _Classes:
        uncommon = real.reshape(-1).index_fill(0, paired, False)
        common, has_rest = side.base[:, paired], _has_rest(piece, call)
        if not has_rest:
            common = common - common.logsumexp(dim=1, keepdim=True)
            return cls(common, torch.full_like(side.chain, FLOOR), uncommon, False)
        outside = side.base.masked_fill(~uncommon, float("-inf")).logsumexp(dim=1)
        return cls(common + side.chain[:, None], log_rest(side.chain, outside), uncommon, True)


def _has_rest(piece: ChunkSlice, call: LossCall) -> bool:
    """Return True if both models have a rest, as a chain has: the tokens that it did not become."""
    vocabulary, paired = call.vocabulary, call.vocabulary.paired_student.shape[0]
    ours = vocabulary.num_student_rows > paired or piece.kind not in (ONE_TO_ONE, ONE_TO_MANY)
    return ours and (vocabulary.num_teacher_rows > paired or piece.kind not in (ONE_TO_ONE, MANY_TO_ONE))


def _divergence_gradient(
    ours: ChunkDistribution, s: _Classes, t: _Classes, sums: Tensor, call: LossCall
) -> tuple[Tensor, Tensor]:
    """Return gradients by z / T of the base rows [c, tp * w] and by b [c], as in mkd/xtoken/chains.py."""
    divergence, common = call.settings.divergence, call.vocabulary.paired_student
    mean, of_common = divergence.mean_slope(sums), divergence.mass_slope(t.common, s.common)
    if not s.has_rest:
        of_base = torch.zeros_like(ours.base)
        of_base[:, common] = of_common.sub_(s.common.exp() * mean[:, None])
        return of_base, torch.zeros_like(mean)
    slope = divergence.slope(t.rest, s.rest)
    of_base = ours.base.exp()
    p_common = of_base[:, common]
    of_base.mul_((slope - mean)[:, None])
    of_base[:, common] = of_common.addcmul_(p_common, (-torch.expm1(ours.chain) * slope - mean)[:, None])
    return of_base, mean - slope


def uld(student: Tensor, teacher: Tensor, scale: Tensor | None, piece: ChunkSlice, call: LossCall) -> Tensor:
    """Return the sorted L1 distances [c] of whole distributions.

    With `scale` [c] overwrite the student's logits with scale * dL/d(z/T).
    """
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
