"""The passes as Triton kernels: the same functions as `chunk_torch_passes.py`, fp32 arithmetic.

Each reads its logits once in their own dtype and makes no temporary of their size; no atomics, so results are
the same bits in every run.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from mkd.losses.triton.triton_divergences import formula_of
from mkd.losses.triton.triton_rows import BLOCK, GRADIENT_BLOCK, TILE
from mkd.xtoken.chunk_kernels import (
    scatter_kernel,
    softmax_gradient_kernel,
    support_gradient_kernel,
    support_parts_kernel,
    support_sums_kernel,
    token_statistics_kernel,
)
from mkd.xtoken.loss_call import LossCall


def support_sums(student: Tensor, teacher: Tensor, lowest: Tensor | None, call: LossCall) -> Tensor:
    n, result = len(student), student.new_empty(4, len(student), dtype=torch.float32)
    if n:
        tensors = student, teacher, call.student_codes, call.teacher_codes, *_contiguous(lowest), result
        numbers = *_sizes(student, teacher, n), 1.0 / call.settings.temperature
        support_sums_kernel[(n,)](*tensors, *numbers, TOP_K=lowest is not None, **TILE)
    return result


def support_parts(
    student: Tensor, teacher: Tensor, lowest: Tensor | None, totals: tuple[Tensor, Tensor], call: LossCall
) -> Tensor:
    n, formula = len(student), formula_of(call.settings.divergence)
    result = student.new_empty(formula.has_first + formula.has_second, n, dtype=torch.float32)
    if n:
        tensors = student, teacher, call.student_codes, *_contiguous(lowest, *totals), result
        numbers = 1.0 / call.settings.temperature, formula.first, formula.second
        switches = dict(TOP_K=lowest is not None, **formula.switches)
        support_parts_kernel[(n,)](*tensors, *_sizes(student, teacher, n), *numbers, **switches, **TILE)
    return result


def write_support_gradient(
    student: Tensor,
    teacher: Tensor,
    lowest: Tensor | None,
    totals: tuple[Tensor, Tensor],
    factors: tuple[Tensor, Tensor],
    scale: Tensor,
    call: LossCall,
) -> None:
    (n, width), formula = student.shape, formula_of(call.settings.divergence)
    if n:
        tensors = student, teacher, call.student_codes, *_contiguous(lowest, *totals, scale, *factors)
        numbers = *_sizes(student, teacher), 1.0 / call.settings.temperature, formula.first, formula.second
        support_gradient_kernel[(n, triton.cdiv(width, GRADIENT_BLOCK))](
            *tensors, *numbers, TOP_K=lowest is not None, KIND=formula.kind, **BLOCK
        )


def token_statistics(logits: Tensor, codes: Tensor, temperature: float = 1.0) -> Tensor:
    n, result = len(logits), logits.new_empty(4, len(logits), dtype=torch.float32)
    if n:
        numbers = logits.stride(0), n, logits.shape[1], 1.0 / temperature
        token_statistics_kernel[(n,)](logits, codes, result, *numbers, **TILE)
    return result


def largest(logits: Tensor, codes: Tensor) -> Tensor:
    return token_statistics(logits, codes)[2]


def log_sums(logits: Tensor, codes: Tensor, call: LossCall) -> Tensor:
    return token_statistics(logits, codes, call.settings.temperature)[0]


def fill(logits: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> None:
    count, block = len(rows), 1024
    if count:
        tensors, numbers = _contiguous(rows, columns, values), (logits.stride(0), count, logits.shape[1])
        scatter_kernel[(triton.cdiv(count, block),)](logits, *tensors, *numbers, BLOCK=block)


def write_softmax_gradient(
    logits: Tensor, codes: Tensor, totals: Tensor, factor: Tensor, call: LossCall
) -> None:
    n, width = logits.shape
    if n:
        numbers = logits.stride(0), width, 1.0 / call.settings.temperature
        softmax_gradient_kernel[(n, triton.cdiv(width, GRADIENT_BLOCK))](
            logits, codes, *_contiguous(totals, factor), *numbers, **BLOCK
        )


def _sizes(student: Tensor, teacher: Tensor, *rows: int) -> tuple[int, ...]:
    return student.stride(0), teacher.stride(0), *rows, student.shape[1], teacher.shape[1]


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return tensors of one number a row as the kernels read them."""
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]
