"""Divergences between teacher and student as (local statistic, value, gradient): one table row each.

Notation: a = z_s / T and b = z_t / T over the ids that both models have, p_s and p_t their softmax over the WHOLE
vocabulary, q_s and q_t their softmax over the columns of one shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mkd.losses.softmax import Normaliser, ShardSoftmax


@dataclass(frozen=True)
class Divergence:
    """What the vocabulary-parallel loss needs to know about one divergence D(teacher, student).

    local: (student, teacher) -> [n], the one cross term of a shard that travels in the all-gather.
    value: (cross terms [tp, n], student, teacher) -> D [n] of the whole vocabulary.
    gradient: (p_s, p_t, D [n]) -> dD/da on the columns of a shard, [n, c]; writes over p_t, leaves p_s.
    """

    local: Callable[[ShardSoftmax, ShardSoftmax], Tensor]
    value: Callable[[Tensor, Normaliser, Normaliser], Tensor]
    gradient: Callable[[Tensor, Tensor, Tensor], Tensor]


def _forward_kl_local(student: ShardSoftmax, teacher: ShardSoftmax) -> Tensor:
    """Mean of d = (b - max b) - (a - max a) under q_t: C_t / S_t of the shard.

    Centring both sides first keeps the digits that `b - a` would lose where the models' logits differ by an offset.
    """
    difference = teacher.centred().sub_(student.centred())
    return difference.mul_(teacher.probabilities).sum(dim=1)


def _forward_kl_value(cross: Tensor, student: Normaliser, teacher: Normaliser) -> Tensor:
    """KL(p_t || p_s) = C_t / S_t - ln S_t + ln S_s.

    A shard's mean of d moves by the shift of both maxima and counts with the teacher's mass on that shard.
    """
    cross = cross + (teacher.shift - student.shift)
    return (teacher.share * cross).sum(dim=0) - teacher.log_sum + student.log_sum


def _forward_kl_gradient(p_s: Tensor, p_t: Tensor, value: Tensor) -> Tensor:
    """dKL(p_t || p_s)/da = p_s - p_t."""
    return p_t.neg_().add_(p_s)


DIVERGENCES = {"forward_kl": Divergence(_forward_kl_local, _forward_kl_value, _forward_kl_gradient)}
