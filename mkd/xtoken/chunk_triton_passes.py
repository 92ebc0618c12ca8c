"""The passes as Triton kernels: the same functions as `chunk_torch_passes.py`, fp32 arithmetic.

Each reads its logits once in their own dtype and makes no temporary of their size; no atomics, so results are
the same bits in every run.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from mkd.losses.triton_divergences import formula_of
from mkd.losses.triton_rows import GRADIENT_BLOCK, GRADIENT_WARPS, LANES, WARPS, WIDTH
from mkd.xtoken.chunk_kernels import (
    scatter_kernel,
    softmax_gradient_kernel,
    support_gradient_kernel,
    support_parts_kernel,
    support_sums_kernel,
    token_statistics_kernel,
)
from mkd.xtoken.loss_call import LossCall

TILE = dict(LANES=LANES, WIDTH=WIDTH, num_warps=WARPS)
BLOCK = dict(BLOCK=GRADIENT_BLOCK, num_warps=GRADIENT_WARPS)


def support_sums(student: Tensor, teacher: Tensor, lowest: Tensor | None, call: LossCall) -> Tensor:
    n, result = len(student), student.new_empty(4, len(student), dtype=torch.float32)
    if n:
        support_sums_kernel[(n,)](
            student,
            teacher,
            call.student_codes,
            call.teacher_codes,
            *_numbers(lowest),
            result,
            student.stride(0),
            teacher.stride(0),
            n,
            student.shape[1],
            teacher.shape[1],
            1.0 / call.settings.temperature,
            TOP_K=lowest is not None,
            **TILE,
        )
    return result


def support_parts(
    student: Tensor, teacher: Tensor, lowest: Tensor | None, totals: tuple[Tensor, Tensor], call: LossCall
) -> Tensor:
    n, formula = len(student), formula_of(call.settings.divergence)
    result = student.new_empty(formula.has_first + formula.has_second, n, dtype=torch.float32)
    if n:
        support_parts_kernel[(n,)](
            student,
            teacher,
            call.student_codes,
            *_numbers(lowest, *totals),
            result,
            student.stride(0),
            teacher.stride(0),
            n,
            student.shape[1],
            teacher.shape[1],
            1.0 / call.settings.temperature,
            formula.first,
            formula.second,
            TOP_K=lowest is not None,
            **formula.switches,
            **TILE,
        )
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
        support_gradient_kernel[(n, triton.cdiv(width, GRADIENT_BLOCK))](
            student,
            teacher,
            call.student_codes,
            *_numbers(lowest, *totals, scale, *factors),
            student.stride(0),
            teacher.stride(0),
            width,
            teacher.shape[1],
            1.0 / call.settings.temperature,
            formula.first,
            formula.second,
            TOP_K=lowest is not None,
            KIND=formula.kind,
            **BLOCK,
        )


def token_statistics(logits: Tensor, codes: Tensor) -> Tensor:
    n, result = len(logits), logits.new_empty(4, len(logits), dtype=torch.float32)
    if n:
        token_statistics_kernel[(n,)](
            logits, codes, result, logits.stride(0), n, logits.shape[1], 1.0, **TILE
        )
    return result


def largest(logits: Tensor, codes: Tensor) -> Tensor:
    return token_statistics(logits, codes)[2]


def log_sums(logits: Tensor, codes: Tensor, call: LossCall) -> Tensor:
    n, result = len(logits), logits.new_empty(4, len(logits), dtype=torch.float32)
    if n:
        token_statistics_kernel[(n,)](
            logits,
            codes,
            result,
            logits.stride(0),
            n,
            logits.shape[1],
            1.0 / call.settings.temperature,
            **TILE,
        )
    return result[0]


def fill(logits: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> None:
    count = len(rows)
    if count:
        block = 1024
        scatter_kernel[(triton.cdiv(count, block),)](
            logits, *_numbers(rows, columns, values), logits.stride(0), count, logits.shape[1], BLOCK=block
        )


def write_softmax_gradient(
    logits: Tensor, codes: Tensor, totals: Tensor, factor: Tensor, call: LossCall
) -> None:
    n, width = logits.shape
    if n:
        softmax_gradient_kernel[(n, triton.cdiv(width, GRADIENT_BLOCK))](
            logits,
            codes,
            *_numbers(totals, factor),
            logits.stride(0),
            width,
            1.0 / call.settings.temperature,
            **BLOCK,
        )


def _numbers(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return tensors of one number a row as the kernels read them: contiguous."""
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]
