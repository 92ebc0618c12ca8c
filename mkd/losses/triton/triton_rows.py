"""The passes over logits as Triton kernels: the same three functions as `torch_rows.py`, fp32 arithmetic.

Statistics read both logits once, the gradient reads them once more and writes once: five passes over one
model's logits in all, seven with the second pass that some divergences need. No temporary of the logits'
size, no atomics: results are the same bits in every run. Rows of mask 0 are not read.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from mkd.losses.kd_objective import KDObjective, LossRows, VocabShard
from mkd.losses.softmax import RowSoftmax
from mkd.losses.statistics import MergedStatistics
from mkd.losses.triton.triton_divergences import KL, Formula, formula_of
from mkd.losses.triton.triton_kernels import gradient_kernel, statistics_kernel, terms_kernel
from mkd.losses.triton.triton_merge import merge_kernel

TILE = dict(LANES=512, WIDTH=8, num_warps=8)  # a row is read in tiles of LANES x WIDTH columns
GRADIENT_BLOCK = 4096  # columns
BLOCK = dict(BLOCK=GRADIENT_BLOCK, num_warps=8)
MERGE_BLOCK = 128  # rows

MERGED = (
    *("student_max", "student_log_sum", "teacher_max", "teacher_log_sum", "residual"),
    *("plain_max", "plain_log_sum", "ce", "kd", "teacher_ce", "teacher_entropy", "top1_agreement"),
)
"""Names of the rows that `merge_kernel` writes."""


def local_statistics(data: LossRows, shard: VocabShard, objective: KDObjective) -> Tensor:
    """Do as `torch_rows.local_statistics`; rows of mask 0 hold meaningless numbers."""
    n, k = len(data.mask), len(objective.statistic_names)
    result = torch.empty(k, n, dtype=torch.float32, device=data.student.device)
    if n:
        student, teacher = _logits(data)
        tensors = student, teacher, data.labels, data.mask, result
        sizes = student.stride(0), teacher.stride(0), n, student.shape[1]
        numbers = shard.start, shard.shared, shard.student, 1.0 / objective.temperature
        statistics_kernel[(n,)](*tensors, *sizes, *numbers, **_switches(objective), **TILE)
    return result


def merge_statistics(gathered: Tensor, shard: VocabShard, objective: KDObjective) -> MergedStatistics:
    """Do as `statistics.merge_statistics`, in one launch; the gradient kernel needs no shares."""
    tp, k, n = gathered.shape
    result = torch.empty(len(MERGED), n, dtype=torch.float32, device=gathered.device)
    formula, divergence = _formula(objective), objective.divergence
    if n:
        numbers = k, n, 1.0 / objective.temperature, formula.first, formula.second
        grid = (triton.cdiv(n, MERGE_BLOCK),)
        merge_kernel[grid](gathered, result, *numbers, **_switches(objective), TP=tp, BLOCK=MERGE_BLOCK)
    row = dict(zip(MERGED, result.unbind(), strict=True))
    kd = ce = {}
    if objective.uses_teacher:
        names = ("teacher_ce", "teacher_entropy", "top1_agreement") + ("kd",) * (not divergence.needs_terms)
        kd = {name: row[name] for name in names}
        kd["residual"] = row["residual"] if "reverse_cross" in divergence.cross_names else None
        kd["student"] = RowSoftmax(row["student_max"], row["student_log_sum"], None)
        kd["teacher"] = RowSoftmax(row["teacher_max"], row["teacher_log_sum"], None)
    if objective.measures_ce:
        ce = {"ce": row["ce"], "student_plain": RowSoftmax(row["plain_max"], row["plain_log_sum"], None)}
    return MergedStatistics(**kd, **ce)


def _formula(objective: KDObjective) -> Formula:
    """Return the formula of the divergence; one that computes nothing if there is no teacher."""
    if objective.uses_teacher:
        return formula_of(objective.divergence)
    return Formula(KL.value, 0.0, 0.0, False, False)


def _switches(objective: KDObjective) -> dict[str, bool]:
    """Return which statistics there are, for the kernels that write and read them."""
    return dict(
        HAS_KD=objective.uses_teacher,
        HAS_CE=objective.measures_ce,
        OWN_CE_SOFTMAX=objective.measures_ce and not objective.ce_reads_kd_softmax,
        HOT=objective.temperature != 1.0,
        FORWARD="forward_cross" in objective.statistic_names,
        REVERSE="reverse_cross" in objective.statistic_names,
    )


def divergence_terms(
    data: LossRows, merged: MergedStatistics, shard: VocabShard, objective: KDObjective
) -> Tensor:
    """Do as `torch_rows.divergence_terms`; rows of mask 0 hold zeros."""
    n, formula = len(data.mask), _formula(objective)
    result = torch.empty(2, n, dtype=torch.float32, device=data.student.device)
    if n:
        student, teacher = _logits(data)
        tensors = student, teacher, data.mask, result, *_normalisers(merged)
        sizes = student.stride(0), teacher.stride(0), n, student.shape[1], shard.shared
        numbers = 1.0 / objective.temperature, formula.first, formula.second
        terms_kernel[(n,)](*tensors, *sizes, *numbers, KIND=formula.kind, **TILE)
    return result


def write_gradient(
    result: Tensor,
    data: LossRows,
    row_weight: Tensor,
    merged: MergedStatistics,
    shard: VocabShard,
    objective: KDObjective,
) -> None:
    """Do as `torch_rows.write_gradient`."""
    n, width = data.student.shape
    if n == 0:
        return
    student, teacher = _logits(data)
    unused = row_weight
    kd, ce, temperature = objective.uses_teacher, objective.uses_ce, objective.temperature
    formula, plain = _formula(objective), merged.student_plain
    of_kd = _normalisers(merged) if kd else (unused,) * 4
    of_ce = (plain.maximum, plain.log_sum) if ce else (unused,) * 2
    residual = unused if merged.residual is None else merged.residual
    tensors = student, teacher, result, data.labels, data.mask, row_weight, *of_kd, residual, *of_ce
    sizes = student.stride(0), teacher.stride(0), result.stride(0), width
    columns = shard.start, shard.shared, shard.student
    kd_weight, ce_weight = objective.kd_ratio * objective.scale / temperature, 1.0 - objective.kd_ratio
    numbers = 1.0 / temperature, kd_weight, ce_weight, formula.first, formula.second
    switches = dict(HAS_KD=kd, HAS_CE=ce, OWN_CE_SOFTMAX=ce and not objective.ce_reads_kd_softmax)
    gradient_kernel[(n, triton.cdiv(width, GRADIENT_BLOCK))](
        *tensors, *sizes, *columns, *numbers, **switches, **formula.switches, **BLOCK
    )


def _normalisers(merged: MergedStatistics) -> tuple[Tensor, ...]:
    own, target = merged.student, merged.teacher
    return own.maximum, own.log_sum, target.maximum, target.log_sum


def _logits(data: LossRows) -> tuple[Tensor, Tensor]:
    """Return both models' logits with columns next to each other; the student's twice without a teacher."""
    student = _unit_stride(data.student)
    return student, student if data.teacher is None else _unit_stride(data.teacher)


def _unit_stride(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()
