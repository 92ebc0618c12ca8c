"""partition_kl of 1-1 chunks: divergence over {common tokens, rest}.

The twin of a common token is in the same column of the same rank, so this is elementwise work and reductions of scalars. The
masses of the rest are summed over the other columns, not taken as 1 - sum. With s = softmax(z / T), D and its mean from
`class_rules`: dL/d(z_j / T) = s_j (D_j - mean), D_j = D of the rest for the columns of the rest.

A model all of whose rows are common tokens has no rest. Then the other model's distribution is conditioned on the common
tokens: for identical tokenizers that is the plain divergence over the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mkd.losses.softmax import LOWEST
from mkd.losses.torch_rows import row_chunks
from mkd.xtoken.loss_call import LossCall, log_split, log_sum_exp, write_scaled


def one_to_one(student: Tensor, teacher: Tensor, scale: Tensor | None, call: LossCall) -> Tensor:
    """Values [c] from the logits [c, w_s] and [c, w_t] of a slice; with `scale` [c] the student's become scale * dL/d(z/T).

    Tensor-parallel group: one all-gather of [4, c] and one all-reduce of [<= 2, c]; with top_k another all-gather of [k, c].
    """
    lowest = _lowest_of_top_k(teacher, call)
    rows = [_Rows(student[r], teacher[r], None if lowest is None else lowest[r], call) for r in row_chunks(teacher)]
    sizes = [r.student.shape[0] for r in rows]
    local = torch.cat([r.log_sums() for r in rows], dim=1)
    sums = call.gather(sums=local)["sums"].logsumexp(dim=0)
    masses = [_Masses.of(s, call) for s in sums.split(sizes, dim=1)]
    totals = call.sum(torch.cat([r.parts(m) for r, m in zip(rows, masses, strict=True)], dim=1))
    if has_rest(call):
        rest = _Masses.of(sums, call)
        totals = totals + torch.stack(call.rule.parts(rest.teacher_rest, rest.student_rest))
    if scale is not None:
        means = call.rule.mean_slope(totals).expand(student.shape[0])
        for r, m, mean, factor in zip(rows, masses, means.split(sizes), scale.split(sizes), strict=True):
            write_scaled(r.student, r.gradient(m, mean), factor)
    return call.rule.value(totals)


def has_rest(call: LossCall) -> bool:
    """Whether both models have a rest; otherwise both are conditioned on the support."""
    top_k = call.settings.top_k
    return call.vocabulary.both_have_rest or (top_k is not None and top_k < call.vocabulary.num_common)


def _lowest_of_top_k(teacher: Tensor, call: LossCall) -> Tensor | None:
    """[c], the k-th largest of the teacher's logits of common tokens; None: all are in the support."""
    top_k = call.settings.top_k
    if top_k is None or top_k >= call.vocabulary.num_common:
        return None
    width = call.common.shape[0]
    largest = [
        teacher[r, :width].masked_fill(~call.common, LOWEST).topk(min(top_k, width), dim=1).values for r in row_chunks(teacher)
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
        """From [4, n]: ln sum exp of the student's support and rest, and of the teacher's."""
        if not has_rest(call):
            return cls(sums[0], sums[2], sums[1], sums[3])
        totals = torch.logaddexp(sums[0], sums[1]), torch.logaddexp(sums[2], sums[3])
        return cls(*totals, log_split(sums[0], sums[1])[1], log_split(sums[2], sums[3])[1])


@dataclass(frozen=True)
class _Rows:
    """Some rows of a slice on this rank's columns."""

    student: Tensor  # [n, w_s] logits
    teacher: Tensor  # [n, w_t]
    lowest: Tensor | None  # [n] smallest logit of the teacher in the support
    call: LossCall

    def support(self) -> Tensor:
        """[w_s] or [n, w_s] bool."""
        if self.lowest is None:
            return self.call.common
        return self.call.common & (self.teacher[:, : self.call.common.shape[0]] >= self.lowest[:, None])

    def log_sums(self) -> Tensor:
        """[4, n]."""
        call, support = self.call, self.support()
        student, teacher = call.heated(self.student), call.heated(self.teacher)
        wide = torch.nn.functional.pad(support, (0, teacher.shape[1] - support.shape[-1]))
        ours = support, call.student_real & ~support
        theirs = wide, call.teacher_real & ~wide
        return torch.stack([*(log_sum_exp(student, c) for c in ours), *(log_sum_exp(teacher, c) for c in theirs)])

    def parts(self, masses: _Masses) -> Tensor:
        """[k, n], this rank's sums over the support."""
        outside = ~self.support()
        return torch.stack([part.masked_fill_(outside, 0.0).sum(dim=1) for part in self.call.rule.parts(*self._logs(masses))])

    def gradient(self, masses: _Masses, mean: Tensor) -> Tensor:
        """dL/d(z/T), [n, w_s]."""
        rule, call, support = self.call.rule, self.call, self.support()
        log_t, log_s = self._logs(masses)
        result = rule.mass_slope(log_t, log_s).masked_fill_(~support, 0.0)
        factor = (-mean)[:, None]
        if has_rest(call):
            background = rule.slope(masses.teacher_rest, masses.student_rest) - mean
            factor = torch.where(support, factor, background[:, None])
            columns = call.student_real
        else:
            columns = support
        return result.add_((log_s.exp_().mul_(factor)).masked_fill_(~columns, 0.0))

    def _logs(self, masses: _Masses) -> tuple[Tensor, Tensor]:
        """ln of both distributions, [n, w_s]; outside the support the teacher's means nothing."""
        teacher = self.call.heated(self.teacher[:, : self.student.shape[1]]) - masses.teacher_total[:, None]
        return teacher, self.call.heated(self.student) - masses.student_total[:, None]
