"""The teacher's certainty about the chunks' tokens, and how often the student's first choice is its own."""

from __future__ import annotations

import torch
from torch import Tensor

from mkd.xtoken.chunks import ONE_TO_ONE
from mkd.xtoken.loss_call import LossCall, at_columns
from mkd.xtoken.slices import ChunkSlice


def slice_metrics(
    student: Tensor, teacher: Tensor, counts: Tensor, piece: ChunkSlice, call: LossCall
) -> dict[str, Tensor]:
    """Return sums over the chunks with `counts` [c] bool, named as in `ChunkOutput`.

    They are computed from the logits [n, w_s], [m, w_t]. Tensor-parallel group: one all-gather of [<= 6, m].
    """
    gathered = call.gather(**_local(student, teacher, piece, call))
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


def _local(student: Tensor, teacher: Tensor, piece: ChunkSlice, call: LossCall) -> dict[str, Tensor]:
    """Return this rank's part at T = 1.

    [m] each: ln sum exp, entropy of the shard's own softmax, logit of the token (LOWEST on other ranks). For
    1-1 chunks also both models' largest logit, and the student's at the teacher's first maximum, -inf if that
    is not a common token.
    """
    passes = call.passes
    sums, entropy, maximum, column = passes.token_statistics(teacher, call.teacher_codes)
    label = at_columns(teacher, call.local_columns(piece.teacher.places, teacher.shape[1])).to(sums.dtype)
    local = {"sums": sums, "entropy": entropy, "label": label}
    if piece.kind == ONE_TO_ONE:
        column = column.long()
        is_common = torch.nn.functional.pad(call.common, (0, teacher.shape[1] - len(call.common)))[column]
        there = student.gather(1, column.clamp(max=student.shape[1] - 1)[:, None]).squeeze(1)
        local["teacher_max"], local["student_max"] = maximum, passes.largest(student, call.student_codes)
        local["student_there"] = there.to(sums.dtype).masked_fill(~is_common, float("-inf"))
    return local
