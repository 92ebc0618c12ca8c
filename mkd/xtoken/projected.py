"""p_kl (X-Token, arXiv 2605.21699): divergence over the teacher's vocabulary, the student's probabilities projected on it.

    q_x = mean over the chunk's student rows of sum_u W[u, x] p_s(u);   t_x = mean over its teacher rows of p_t(x)

Classes are the teacher's tokens that W has a value for, and the rest: what W loses of the student's probability (rows without
support), and the teacher's other tokens. So both sum to 1 and the value is not negative. Where one of them has no rest, the
other is conditioned on the supported tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.xtoken.chunk_vocabulary import Projection
from mkd.xtoken.loss_call import FLOOR, LossCall, log_sum_exp, write_scaled
from mkd.xtoken.segments import sum_by
from mkd.xtoken.slices import ChunkSlice, SideRows


def p_kl(student: Tensor, teacher: Tensor, scale: Tensor | None, piece: ChunkSlice, call: LossCall) -> Tensor:
    """Values [c] from the logits [n, w_s], [m, w_t]; with `scale` [c] the student's become scale * dL/d(z/T).

    Tensor-parallel group: an all-gather of row sums, a reduce-scatter of [tp, w_t, c], two all-reduces of a few rows of c;
    for the gradient an all-gather of [w_t, c] and an all-reduce of [n].
    """
    projection = call.vocabulary.projection
    with_rest = projection.student_rest and projection.teacher_rest
    s_values, t_values = call.heated(student), call.heated(teacher)
    sums = call.gather(s=log_sum_exp(s_values, call.student_real), t=log_sum_exp(t_values, call.teacher_real))
    p = _probabilities(s_values, sums["s"], call.student_real)
    own_mean = _chunk_means(p, piece.student)
    their_mean = _chunk_means(_probabilities(t_values, sums["t"], call.teacher_real), piece.teacher).t()
    projected = _reduce_scatter(_sparse_product(projection.forward, own_mean.t()), call)  # [w_t, c]

    supported = projection.supported[:, None]
    lost = own_mean @ projection.lost.to(own_mean.dtype)
    theirs = (their_mean.masked_fill(columns, 0.0).sum(dim=0) for columns in (~supported, supported))
    kept, lost, their_kept, their_rest = call.sum(torch.stack([projected.sum(dim=0), lost, *theirs]))
    log_s, log_t = _log(projected), _log(their_mean)
    if not with_rest:
        log_s, log_t = log_s - kept.log(), log_t - their_kept.log()
    parts = [part.masked_fill_(~supported, 0.0).sum(dim=0) for part in call.rule.parts(log_t, log_s)]
    totals = call.sum(torch.stack(parts))
    if with_rest:
        totals = totals + torch.stack(call.rule.parts(_log(their_rest), _log(lost)))
    if scale is not None:
        mean = call.rule.mean_slope(totals)
        by_class = (call.rule.slope(log_t, log_s) - mean).masked_fill_(~supported, 0.0)
        by_rest = call.rule.slope(_log(their_rest), _log(lost)) - mean if with_rest else torch.zeros_like(mean)
        by_class = by_class if with_rest else by_class / kept
        by_mean = _by_student(projection, by_class, by_rest, call)
        write_scaled(student, _softmax_gradient(p, by_mean, piece.student, call), scale[piece.student.chunks])
    return call.rule.value(totals)


def _probabilities(values: Tensor, sums: Tensor, real: Tensor) -> Tensor:
    """[n, w] of z / T [n, w] and the ranks' ln sum exp [tp, n]."""
    return values.sub(sums.logsumexp(dim=0)[:, None]).exp_().masked_fill_(~real, 0.0)


def _chunk_means(rows: Tensor, side: SideRows) -> Tensor:
    """[n, w] -> [c, w]."""
    if not len(side.others):
        return rows
    means = sum_by(side.chunks, rows, len(side.base))
    return means.div_(_tokens(side, rows.dtype)[:, None])


def _tokens(side: SideRows, dtype: torch.dtype) -> Tensor:
    """[c], tokens of each chunk."""
    one = torch.ones((), dtype=dtype, device=side.chunks.device)
    return sum_by(side.chunks, one.expand(len(side.chunks)), len(side.base))


def _log(masses: Tensor) -> Tensor:
    return masses.log().clamp_(min=FLOOR)


def _sparse_product(matrix: Tensor, dense: Tensor) -> Tensor:
    """[a, b] sparse CSR fp32 @ [b, c] -> [a, c]."""
    return torch.sparse.mm(matrix if dense.dtype == matrix.dtype else matrix.to(dense.dtype), dense.contiguous())


def _reduce_scatter(parts: Tensor, call: LossCall) -> Tensor:
    """[tp * w_t, c], summed over the ranks -> this rank's [w_t, c]; no backward."""
    if not call.is_split:
        return parts
    own = parts.new_empty(call.vocabulary.teacher_width, parts.shape[1])
    dist.reduce_scatter_tensor(own, parts, group=call.tp_group)
    return own


def _by_student(projection: Projection, by_class: Tensor, by_rest: Tensor, call: LossCall) -> Tensor:
    """dL/d(mean of p_s), [c, w_s], from this rank's dL/dq [w_t, c] and that of the rest [c]."""
    of_all = call.gather(by_class=by_class)["by_class"].flatten(0, 1)
    result = _sparse_product(projection.backward, of_all)
    return result.addcmul_(projection.lost.to(result.dtype)[:, None], by_rest).t()


def _softmax_gradient(p: Tensor, by_mean: Tensor, side: SideRows, call: LossCall) -> Tensor:
    """p (dL/dp - sum p dL/dp), [n, w_s], where dL/dp of a row is its chunk's over the number of its tokens."""
    by_p = (by_mean / _tokens(side, p.dtype)[:, None])[side.chunks]
    inner = call.sum((p * by_p).sum(dim=1))
    return by_p.sub_(inner[:, None]).mul_(p)
