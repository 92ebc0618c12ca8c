"""partition_kl of 1-1 chunks: divergence over {common tokens, rest}.

The twin of a common token is in the same column of the same rank, so this is elementwise work and reductions
of scalars. The masses of the rest are summed over the other columns, not taken as 1 - sum. With s = softmax(z
/ T), D and its mean from `mkd/losses/divergences.py`: dL/d(z_j / T) = s_j (D_j - mean), D_j = D of the rest
for the columns of the rest.

If all rows of a model are common tokens, the model has no rest. Then the other model's distribution is
conditioned on the common tokens: for identical tokenizers that is the plain divergence over the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mkd.losses.softmax import LOWEST
from mkd.losses.torch_rows import row_blocks
from mkd.xtoken.loss_call import LossCall, log_split


def one_to_one(student: Tensor, teacher: Tensor, scale: Tensor | None, call: LossCall) -> Tensor:
    """Return values [c] from the logits [c, w_s] and [c, w_t] of a slice.

    With `scale` [c] overwrite the student's with scale * dL/d(z/T). Tensor-parallel group: one all-gather of
    [4, c] and one all-reduce of [<= 2, c]; with top_k another all-gather of [k, c].
    """
    passes, divergence, lowest = call.passes, call.settings.divergence, _lowest_of_top_k(teacher, call)
    sums = call.gather(sums=passes.support_sums(student, teacher, lowest, call))["sums"].logsumexp(dim=0)
    masses = _Masses.of(sums, call)
    normalisers = masses.student_total, masses.teacher_total
    totals = call.sum(passes.support_parts(student, teacher, lowest, normalisers, call))
    if has_rest(call):
        totals = totals + torch.stack(divergence.parts(masses.teacher_rest, masses.student_rest))
    if scale is not None:
        mean = divergence.mean_slope(totals) + torch.zeros_like(normalisers[0])
        beside = torch.zeros_like(mean)
        if has_rest(call):
            beside = divergence.slope(masses.teacher_rest, masses.student_rest) - mean
        passes.write_support_gradient(student, teacher, lowest, normalisers, (-mean, beside), scale, call)
    return divergence.value(totals)


def has_rest(call: LossCall) -> bool:
    """Return True if both models have a rest; otherwise both are conditioned on the support."""
    top_k = call.settings.top_k
    return call.vocabulary.both_have_rest or (top_k is not None and top_k < call.vocabulary.num_common)


def _lowest_of_top_k(teacher: Tensor, call: LossCall) -> Tensor | None:
    """Return the teacher's k-th largest logit of a common token, [c]; None if all are in the support."""
    top_k = call.settings.top_k
    if top_k is None or top_k >= call.vocabulary.num_common:
        return None
    width = call.common.shape[0]
    largest = [
        teacher[r, :width].masked_fill(~call.common, LOWEST).topk(min(top_k, width), dim=1).values
        for r in row_blocks(teacher)
    ]
    local = torch.nn.functional.pad(torch.cat(largest), (0, top_k - min(top_k, width)), value=LOWEST)
    gathered = call.gather(largest=local)["largest"]
    return gathered.movedim(0, 1).flatten(1).topk(top_k, dim=1).values[:, -1]


@dataclass(frozen=True)
class _Masses:
    """Row values [n]: normalisers over the whole vocabulary, and ln of the masses of the rest."""

    student_total: Tensor
    teacher_total: Tensor
    student_rest: Tensor
    teacher_rest: Tensor

    @classmethod
    def of(cls, sums: Tensor, call: LossCall) -> _Masses:
        """Merge [4, n]: ln sum exp of the student's support and rest, and of the teacher's."""
        if not has_rest(call):
            return cls(sums[0], sums[2], sums[1], sums[3])
        totals = torch.logaddexp(sums[0], sums[1]), torch.logaddexp(sums[2], sums[3])
        return cls(*totals, log_split(sums[0], sums[1])[1], log_split(sums[2], sums[3])[1])
