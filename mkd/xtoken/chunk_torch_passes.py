"""The passes in plain torch: the definition that the Triton kernels follow, and the code that CPUs run.

Legend: n rows, w_s and w_t local columns of both models, e entries, k parts of the divergence. `codes` [w]
int8 are those of `LossCall`: 0 is a column without a row of the model. "Support": the common columns, with
`lowest` [n] only those where the teacher's logit is not below it. Normalisers ("totals") are those of z / T
over the whole vocabulary. Results are in the compute dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mkd.losses.softmax import LOWEST, compute_dtype
from mkd.losses.torch_rows import row_blocks
from mkd.xtoken.loss_call import COMMON, LossCall, log_sum_exp, write_scaled


def support_sums(student: Tensor, teacher: Tensor, lowest: Tensor | None, call: LossCall) -> Tensor:
    """Return ln sum exp of z / T, [4, n]: the student's support and its other rows, then the teacher's."""
    parts = []
    for rows in row_blocks(teacher):
        support = _support(teacher[rows], lowest, rows, call)
        wide = torch.nn.functional.pad(support, (0, teacher.shape[1] - support.shape[-1]))
        masks = (support, (call.student_codes != 0) & ~support), (wide, (call.teacher_codes != 0) & ~wide)
        values = call.scaled(student[rows]), call.scaled(teacher[rows])
        parts.append(
            torch.stack([log_sum_exp(v, m) for v, both in zip(values, masks, strict=True) for m in both])
        )
    return torch.cat(parts, dim=1)


def support_parts(
    student: Tensor, teacher: Tensor, lowest: Tensor | None, totals: tuple[Tensor, Tensor], call: LossCall
) -> Tensor:
    """Return this rank's sums of `Divergence.parts` over the support, [k, n]."""
    parts = []
    for rows in row_blocks(teacher):
        outside = ~_support(teacher[rows], lowest, rows, call)
        of_columns = call.settings.divergence.parts(*_logs(student[rows], teacher[rows], totals, rows, call))
        parts.append(torch.stack([part.masked_fill_(outside, 0.0).sum(dim=1) for part in of_columns]))
    return torch.cat(parts, dim=1)


def write_support_gradient(
    student: Tensor,  # [n, w_s], becomes (s D in the support + factor p_s) * scale
    teacher: Tensor,
    lowest: Tensor | None,
    totals: tuple[Tensor, Tensor],
    factors: tuple[Tensor, Tensor],  # [n] in the support, and on the student's other rows
    scale: Tensor,  # [n]
    call: LossCall,
) -> None:
    """Overwrite the student's logits with their gradient."""
    for rows in row_blocks(teacher):
        support = _support(teacher[rows], lowest, rows, call)
        log_t, log_s = _logs(student[rows], teacher[rows], totals, rows, call)
        factor = torch.where(support, factors[0][rows, None], factors[1][rows, None])
        result = call.settings.divergence.mass_slope(log_t, log_s).masked_fill_(~support, 0.0)
        result.add_(log_s.exp_().mul_(factor).masked_fill_(call.student_codes == 0, 0.0))
        write_scaled(student[rows], result, scale[rows])


def token_statistics(logits: Tensor, codes: Tensor) -> Tensor:
    """Return [4, n] of this rank's columns at T = 1: ln sum exp, entropy, largest logit, its first column."""
    parts = []
    for rows in row_blocks(logits):
        values = logits[rows].to(compute_dtype(logits)).masked_fill(codes == 0, LOWEST)
        logs, top = torch.log_softmax(values, dim=1), values.max(dim=1)
        entropy = -(logs.exp() * logs).sum(dim=1)
        parts.append(
            torch.stack([values.logsumexp(dim=1), entropy, top.values, top.indices.to(values.dtype)])
        )
    return torch.cat(parts, dim=1)


def largest(logits: Tensor, codes: Tensor) -> Tensor:
    """Return the largest logit, [n]."""
    return logits.masked_fill(codes == 0, torch.finfo(logits.dtype).min).amax(dim=1).to(compute_dtype(logits))


def log_sums(logits: Tensor, codes: Tensor, call: LossCall) -> Tensor:
    """Return ln sum exp of z / T, [n]."""
    return torch.cat([log_sum_exp(call.scaled(logits[rows]), codes != 0) for rows in row_blocks(logits)])


def fill(logits: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> None:
    """Set logits[rows, columns] = values, all [e]; columns from w on are other ranks' and skipped."""
    width = logits.shape[1]
    places, foreign = (rows, columns.clamp(max=width - 1)), columns == width
    for summand in (-logits[places], values.to(logits.dtype)):  # x - x is 0, and then a sum is exact
        logits.index_put_(places, summand.masked_fill(foreign, 0.0), accumulate=True)


def write_softmax_gradient(
    logits: Tensor, codes: Tensor, totals: Tensor, factor: Tensor, call: LossCall
) -> None:
    """Overwrite the logits with p * factor; `totals` and `factor` are [n]."""
    for rows in row_blocks(logits):
        p = call.scaled(logits[rows]).sub(totals[rows, None]).exp_().masked_fill_(codes == 0, 0.0)
        write_scaled(logits[rows], p, factor[rows])


def _support(teacher: Tensor, lowest: Tensor | None, rows: slice, call: LossCall) -> Tensor:
    """Return the mask of the support, [w_s] or [n, w_s] bool."""
    common = call.student_codes == COMMON
    return common if lowest is None else common & (teacher[:, : len(common)] >= lowest[rows, None])


def _logs(
    student: Tensor, teacher: Tensor, totals: tuple[Tensor, Tensor], rows: slice, call: LossCall
) -> tuple[Tensor, Tensor]:
    """Return ln p of teacher and student, [n, w_s]; the teacher's is meaningless outside the support."""
    log_t = call.scaled(teacher[:, : student.shape[1]]) - totals[1][rows, None]
    return log_t, call.scaled(student) - totals[0][rows, None]
