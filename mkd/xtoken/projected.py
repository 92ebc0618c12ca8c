"""Divergence of both models' probabilities on common classes: p_kl, and prefix_kl at the start of chunks.

    q_x = mean over the chunk's student rows of sum_u S[u, x] p_s(u);   t_x likewise of its teacher rows, by T

p_kl (X-Token, arXiv 2605.21699): classes are the teacher's tokens, S is the projection matrix, T the
identity. prefix_kl: classes are the common tokens, and S and T have a 1 where a token begins with a common
one. The rest of the student is the probability that S loses. The rest of the teacher is its probability on
classes that S has no value for, and what T loses. So both sum to 1 and the value is not negative. Where one
of them has no rest, the other is conditioned on the supported classes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.xtoken.chains import chains
from mkd.xtoken.chunks import ONE_TO_ONE
from mkd.xtoken.loss_call import FLOOR, LossCall, log_sum_exp, write_scaled
from mkd.xtoken.segments import sum_segments
from mkd.xtoken.slices import ChunkSlice, SideRows
from mkd.xtoken.vocabulary.chunk_vocabulary import ClassMap


def projected(
    student: Tensor, teacher: Tensor, scale: Tensor | None, piece: ChunkSlice, call: LossCall
) -> Tensor:
    """Return values [c] from the logits [n, w_s], [m, w_t].

    With `scale` [c] overwrite the student's with scale * dL/d(z/T).

    Tensor-parallel group: an all-gather of row sums, a reduce-scatter of [tp * k, c] for each map, two
    all-reduces of a few rows of c; for the gradient an all-gather of [k, c] and an all-reduce of [n].
    """
    projection, divergence = call.vocabulary.projection, call.settings.divergence
    with_rest = projection.student_rest and projection.teacher_rest
    s_values, t_values = call.scaled(student), call.scaled(teacher)
    sums = call.gather(s=log_sum_exp(s_values, call.student_real), t=log_sum_exp(t_values, call.teacher_real))
    p = _probabilities(s_values, sums["s"], call.student_real)
    own_mean = _chunk_means(p, piece.student)
    their_mean = _chunk_means(_probabilities(t_values, sums["t"], call.teacher_real), piece.teacher)
    ours, lost = _on_classes(own_mean, projection.student, call)
    theirs, their_lost = _on_classes(their_mean, projection.teacher, call)
    supported = projection.supported[:, None]
    their_rest = their_lost + theirs.masked_fill(supported, 0.0).sum(dim=0)
    their_kept = theirs.masked_fill(~supported, 0.0).sum(dim=0)
    masses = torch.stack([ours.sum(dim=0), lost, their_kept, their_rest])
    kept, lost, their_kept, their_rest = call.sum(masses)
    log_s, log_t = _log(ours), _log(theirs)
    if not with_rest:
        log_s, log_t = log_s - kept.log(), log_t - their_kept.log()
    parts = [part.masked_fill_(~supported, 0.0).sum(dim=0) for part in divergence.parts(log_t, log_s)]
    totals = call.sum(torch.stack(parts))
    if with_rest:
        totals = totals + torch.stack(divergence.parts(_log(their_rest), _log(lost)))
    if scale is not None:
        mean = divergence.mean_slope(totals)
        by_class = (divergence.slope(log_t, log_s) - mean).masked_fill_(~supported, 0.0)
        if with_rest:
            by_rest = divergence.slope(_log(their_rest), _log(lost)) - mean
        else:
            by_class, by_rest = by_class / kept, torch.zeros_like(mean)
        by_mean = _by_columns(projection.student, by_class, by_rest, call)
        write_scaled(student, _softmax_gradient(p, by_mean, piece.student, call), scale[piece.student.chunks])
    return divergence.value(totals)


def prefix_kl(
    student: Tensor, teacher: Tensor, scale: Tensor | None, piece: ChunkSlice, call: LossCall
) -> Tensor:
    """Return values [c] from the logits [n, w_s], [m, w_t].

    With `scale` [c] overwrite the student's with scale * dL/d(z/T).

    A token without a twin counts as the common token that it begins with. Say the teacher may write "
    configuration" and the student only " config". Then the student's " config" should be as likely as
    everything beginning with it that the teacher may write. Both sides have read the same bytes where a chunk
    starts, so every chunk is compared at its first tokens. A chunk of several tokens is also compared by its
    realised chain, as in partition_kl. The classes cover both vocabularies (control tokens of one side alone
    are the rest): for identical tokenizers it is the plain divergence.

    Tensor-parallel group: the communication of `projected`, and that of `chains` for chunks of several
    tokens.
    """
    if piece.kind == ONE_TO_ONE:
        return projected(student, teacher, scale, piece, call)
    starts = piece.student.starts
    own = student[starts]  # a copy, that `projected` may overwrite
    values = projected(own, teacher[piece.teacher.starts], scale, piece.at_starts(), call)
    values = values + chains(student, teacher, scale, piece, call)
    if scale is not None:
        student[starts] += own
    return values


def _probabilities(values: Tensor, sums: Tensor, real: Tensor) -> Tensor:
    """Return probabilities [n, w] from z / T [n, w] and the ranks' ln sum exp [tp, n]."""
    return values.sub(sums.logsumexp(dim=0)[:, None]).exp_().masked_fill_(~real, 0.0)


def _chunk_means(rows: Tensor, side: SideRows) -> Tensor:
    """Return the mean of each chunk's rows, [n, w] -> [c, w]."""
    if not len(side.others):
        return rows
    means = sum_segments(side.chunks, rows, len(side.base))
    return means.div_(_tokens(side, rows.dtype)[:, None])


def _tokens(side: SideRows, dtype: torch.dtype) -> Tensor:
    """Return the number of tokens of each chunk, [c]."""
    one = torch.ones((), dtype=dtype, device=side.chunks.device)
    return sum_segments(side.chunks, one.expand(len(side.chunks)), len(side.base))


def _log(masses: Tensor) -> Tensor:
    return masses.log().clamp_(min=FLOOR)


def _sparse_product(matrix: Tensor, dense: Tensor) -> Tensor:
    """Multiply [a, b] sparse CSR fp32 by [b, c] -> [a, c]."""
    return torch.sparse.mm(matrix.to(dense.dtype), dense.contiguous())


def _on_classes(means: Tensor, classes: ClassMap | None, call: LossCall) -> tuple[Tensor, Tensor]:
    """Map means [c, w] to (this rank's classes [k, c], the mass that this rank's columns lose [c])."""
    if classes is None:
        return means.t(), means.new_zeros(len(means))
    parts = _sparse_product(classes.forward, means.t())
    return _reduce_scatter(parts, call), means @ classes.lost.to(means.dtype)


def _reduce_scatter(parts: Tensor, call: LossCall) -> Tensor:
    """Sum [tp * k, c] over the ranks and return this rank's [k, c]; no backward."""
    if not call.is_split:
        return parts
    own = parts.new_empty(parts.shape[0] // dist.get_world_size(call.tp_group), parts.shape[1])
    dist.reduce_scatter_tensor(own, parts, group=call.tp_group)
    return own


def _by_columns(classes: ClassMap, by_class: Tensor, by_rest: Tensor, call: LossCall) -> Tensor:
    """Return dL/d(mean of p_s), [c, w_s], from this rank's dL/dq [k, c] and that of the rest [c]."""
    of_all = call.gather(by_class=by_class)["by_class"].flatten(0, 1)
    result = _sparse_product(classes.backward, of_all)
    return result.addcmul_(classes.lost.to(result.dtype)[:, None], by_rest).t()


def _softmax_gradient(p: Tensor, by_mean: Tensor, side: SideRows, call: LossCall) -> Tensor:
    """Return p (dL/dp - sum p dL/dp), [n, w_s].

    dL/dp of a row is its chunk's, divided by the number of the chunk's tokens.
    """
    by_p = (by_mean / _tokens(side, p.dtype)[:, None])[side.chunks]
    inner = call.sum((p * by_p).sum(dim=1))
    return by_p.sub_(inner[:, None]).mul_(p)
