"""partition_kl of chunks with several tokens: divergence over {listed pairs, rest}.

On a side, the pair (u, x) has the score S = exp(b + ln p(u)). b is the log-probability of the realised tokens
before the last one. The rest is 1 - sum S = (1 - e^b) + e^b * (mass of the last row's other columns), all
summands summed directly. With D, the mean of D under S and the rest, and background g = D_rest - mean, the
gradient by z / T of a side's rows is

    last row, column u of a pair:  S_u D_u + p_u ((1 - e^b) D_rest - mean);   other columns:  p_j g
    prefix row, realised column:  -(1 - p) g;                                 other columns:  p_j g

which is scatter(G) - p sum(G) and (onehot - p) sum(G) with G = S (D - D_rest), ordered so that nothing
cancels where the rest is small.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mkd.losses.softmax import LOWEST
from mkd.xtoken.loss_call import LossCall, log_rest, log_split
from mkd.xtoken.segments import log_sum_exp_by, sum_segments
from mkd.xtoken.slices import ChunkSlice, SideRows


def chains(
    student: Tensor, teacher: Tensor, scale: Tensor | None, piece: ChunkSlice, call: LossCall
) -> Tensor:
    """Return values [c] from the logits [n, w_s], [m, w_t] of a slice.

    With `scale` [c] overwrite the student's with scale * dL/d(z/T). The teacher's are modified too.
    Tensor-parallel group: one all-gather of a number for each row, realised token and pair.
    """
    ours = _Entries.of(student, piece.student, piece.pair_chunks, piece.pair_student, call)
    theirs = _Entries.of(teacher, piece.teacher, piece.pair_chunks, piece.pair_teacher, call)
    passes = call.passes
    s_local = passes.log_sums(student, call.student_codes, call)
    t_local = passes.log_sums(teacher, call.teacher_codes, call)
    gathered = call.gather(s=s_local, s_found=ours.found, t=t_local, t_found=theirs.found)
    s = _Scores.of(ours, gathered["s"].logsumexp(dim=0), gathered["s_found"].amax(dim=0))
    t = _Scores.of(theirs, gathered["t"].logsumexp(dim=0), gathered["t_found"].amax(dim=0))
    divergence, count = call.settings.divergence, len(piece.student.base)
    of_both = zip(divergence.parts(t.pairs, s.pairs), divergence.parts(t.rest, s.rest), strict=True)
    sums = torch.stack([sum_segments(piece.pair_chunks, pairs, count) + rest for pairs, rest in of_both])
    if scale is not None:
        _write_gradient(student, ours, s, t, divergence.mean_slope(sums), scale, call)
    return divergence.value(sums)


@dataclass(frozen=True)
class _Entries:
    """The e entries of one side: columns of the realised tokens of the prefix, then those of the pairs."""

    side: SideRows
    pair_chunks: Tensor  # [p]
    rows: Tensor  # [e]
    columns: Tensor  # [e] w if the column is another rank's
    found: Tensor  # [e] z / T, LOWEST if the column is another rank's

    @classmethod
    def of(
        cls, logits: Tensor, side: SideRows, pair_chunks: Tensor, pairs: Tensor, call: LossCall
    ) -> _Entries:
        """Take the entries out of the logits, so that sums over the others lose nothing."""
        rows, width = torch.cat([side.others, side.base[pair_chunks]]), logits.shape[1]
        columns = call.local_columns(torch.cat([side.places[side.others], pairs]), width)
        found = call.scaled(logits[rows, columns.clamp(max=width - 1)]).masked_fill(columns == width, LOWEST)
        lowest = max(LOWEST, torch.finfo(logits.dtype).min)
        call.passes.fill(logits, rows, columns, torch.full_like(found, lowest))
        return cls(side, pair_chunks, rows, columns, found)


@dataclass(frozen=True)
class _Scores:
    """Logarithms over the whole vocabulary."""

    totals: Tensor  # [n] ln sum exp of the row
    outside: Tensor  # [n] ln of the mass of the columns that are no entries
    entries: Tensor  # [e] ln p
    prefixes: Tensor  # [c] b
    pairs: Tensor  # [p] ln S
    rest: Tensor  # [c]

    @classmethod
    def of(cls, entries: _Entries, others: Tensor, found: Tensor) -> _Scores:
        side, pair_chunks = entries.side, entries.pair_chunks
        own = log_sum_exp_by(entries.rows, found, others.shape[0])
        inside, outside = log_split(own, others)
        logs = found - own[entries.rows] + inside[entries.rows]
        of_prefix, of_pairs = logs.split([len(side.others), len(pair_chunks)])
        prefixes = sum_segments(side.other_chunks, of_prefix, len(side.base))
        totals, pairs = torch.logaddexp(own, others), prefixes[pair_chunks] + of_pairs
        return cls(totals, outside, logs, prefixes, pairs, log_rest(prefixes, outside[side.base]))


def _write_gradient(
    student: Tensor, ours: _Entries, s: _Scores, t: _Scores, mean: Tensor, scale: Tensor, call: LossCall
) -> None:
    """Overwrite the logits [n, w_s], whose entries were taken out, with the gradient."""
    side, chunks, passes, divergence = ours.side, ours.pair_chunks, call.passes, call.settings.divergence
    slope = divergence.slope(t.rest, s.rest)
    background = slope - mean
    of_prefix = -s.outside[side.others].exp() * background[side.other_chunks]
    of_last = (-torch.expm1(s.prefixes) * slope - mean)[chunks]
    of_pairs = divergence.mass_slope(t.pairs, s.pairs) + s.entries[len(side.others) :].exp() * of_last
    factor = _scaled(background, scale)[side.chunks]
    entries = _scaled(torch.cat([of_prefix, of_pairs]), scale[torch.cat([side.other_chunks, chunks])])
    passes.write_softmax_gradient(student, call.student_codes, s.totals, factor, call)
    passes.fill(student, ours.rows, ours.columns, entries)


def _scaled(values: Tensor, scale: Tensor) -> Tensor:
    """Return values * scale, exactly 0 where the scale is 0."""
    return (values * scale).masked_fill_(scale == 0, 0.0)
