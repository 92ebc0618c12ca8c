"""Several teachers' predictions as one: the weighted mean of their probabilities, in the form of logits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.losses.softmax import compute_dtype


def mixture_logits(
    logits: Iterable[
        Tensor
    ],  # each [n, w], this rank's columns; overwritten where they have the compute dtype
    shares: Sequence[float],  # adding up to 1
    temperature: float,
    real: int,  # the first so many columns of this rank are ids that all models have
    tp_group: dist.ProcessGroup | None,
) -> Tensor:
    """z [n, w] with softmax(z / T) = sum over i of shares[i] * softmax(logits[i] / T), in the dtype of the logits.

    So z = T ln(that sum) + a constant of each row, which puts the largest near 0, where rounding is least. Metrics that read
    z at T = 1 are those of a sharpened mixture unless T is 1. Columns that are not real keep whatever they hold: no loss reads
    them. Communication: one all-reduce MAX and one SUM of [n] for each.
    """
    total = offset = dtype = None
    for one, share in zip(logits, shares, strict=True):
        dtype = one.dtype
        centred, log_sum = _centred(one.to(compute_dtype(one)), temperature, real, tp_group)
        own = math.log(share) - log_sum
        if total is None:
            total, offset = centred, own
            continue
        highest = torch.maximum(offset, own)
        total[:, :real] += offset - highest
        centred[:, :real] += own - highest
        total, offset = torch.logaddexp(total, centred), highest
    return total.mul_(temperature).to(dtype)


def _centred(
    logits: Tensor, temperature: float, real: int, tp_group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """(logits / T - their maximum, ln of the sum of its exponentials [n, 1]) over the real columns of all ranks; the first is
    written over `logits`."""
    columns = logits.div_(temperature)[:, :real]
    is_split = tp_group is not None and dist.get_world_size(tp_group) > 1
    lowest = torch.finfo(logits.dtype).min
    maximum = columns.amax(dim=1, keepdim=True) if real else logits.new_full((len(logits), 1), lowest)
    if is_split:
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=tp_group)
    total = columns.sub_(maximum).exp().sum(dim=1, keepdim=True)
    if is_split:
        dist.all_reduce(total, group=tp_group)
    return logits, total.log()
