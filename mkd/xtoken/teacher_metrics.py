"""How sure the teacher is of the chunks' tokens, and how often the student's first choice is the teacher's."""

from __future__ import annotations

import torch
from torch import Tensor

from mkd.losses.softmax import LOWEST, compute_dtype
from mkd.losses.torch_rows import row_chunks
from mkd.xtoken.chunks import ONE_TO_ONE
from mkd.xtoken.loss_call import LossCall, at_columns
from mkd.xtoken.slices import ChunkSlice


def slice_metrics(student: Tensor, teacher: Tensor, counts: Tensor, piece: ChunkSlice, call: LossCall) -> dict[str, Tensor]:
    """Sums over the chunks with `counts` [c] bool, named as in `ChunkOutput`, from the logits [n, w_s], [m, w_t].

    Tensor-parallel group: one all-gather of [<= 6, m].
    """
    local = _teacher_local(teacher, piece, call)
    if piece.kind == ONE_TO_ONE:
        local |= _student_local(student, teacher, call)
    gathered = call.gather(**local)
    normaliser = gathered["sums"].logsumexp(dim=0)
    log_share = gathered["sums"] - normaliser
    ce = normaliser - gathered["label"].amax(dim=0)
    entropy = (log_share.exp() * (gathered["entropy"] - log_share)).sum(dim=0)
    of_rows = counts[piece.teacher.chunks]
    metrics = {
        "teacher_ce": torch.where(of_rows, ce, 0.0).sum(),
        "teacher_entropy": torch.where(of_rows, entropy, 0.0).sum(),
        "num_chunks": counts.sum(),
        "num_teacher_tokens": of_rows.sum(),
    }
    if piece.kind == ONE_TO_ONE:
        rank = gathered["teacher_max"].argmax(dim=0, keepdim=True)
        student_there = gathered["student_there"].gather(0, rank).squeeze(0)
        agrees = counts & (student_there == gathered["student_max"].amax(dim=0))
        metrics |= {"top1_agreement": agrees.sum().to(ce.dtype), "num_one_to_one": counts.sum()}
    return metrics


def _teacher_local(teacher: Tensor, piece: ChunkSlice, call: LossCall) -> dict[str, Tensor]:
    """[m] each: ln sum exp, entropy of the shard's own softmax, logit of the token (LOWEST on other ranks); at T = 1."""
    columns = call.local_columns(piece.teacher.places, teacher.shape[1])
    parts = []
    for rows in row_chunks(teacher):
        values = teacher[rows].to(compute_dtype(teacher)).masked_fill(~call.teacher_real, LOWEST)
        logs = torch.log_softmax(values, dim=1)
        label = at_columns(values, columns[rows])
        parts.append(torch.stack([values.logsumexp(dim=1), -(logs.exp() * logs).sum(dim=1), label]))
    return dict(zip(("sums", "entropy", "label"), torch.cat(parts, dim=1).unbind(), strict=True))


def _student_local(student: Tensor, teacher: Tensor, call: LossCall) -> dict[str, Tensor]:
    """[c] each: both models' largest logit; the student's at the teacher's first maximum, -inf if that is no common token."""
    parts = []
    for rows in row_chunks(teacher):
        ours = student[rows].to(compute_dtype(student)).masked_fill(~call.student_real, LOWEST)
        top = teacher[rows].to(compute_dtype(teacher)).masked_fill(~call.teacher_real, LOWEST).max(dim=1)
        twins = torch.nn.functional.pad(ours.masked_fill(~call.common, float("-inf")), (0, 1), value=float("-inf"))
        there = twins.gather(1, top.indices.clamp(max=ours.shape[1])[:, None]).squeeze(1)
        parts.append(torch.stack([top.values, ours.amax(dim=1), there]))
    return dict(zip(("teacher_max", "student_max", "student_there"), torch.cat(parts, dim=1).unbind(), strict=True))
