"""A chunk's distribution over a whole vocabulary, as the published losses define it.

It is dense and gathered from all ranks. P(y) = p_last(y) * product of p(realised token) over the chunk's
other tokens. It sums to e^b <= 1, where b is the log of the product.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mkd.losses.softmax import LOWEST
from mkd.xtoken.loss_call import LossCall, at_columns, log_sum_exp, write_scaled
from mkd.xtoken.segments import sum_segments
from mkd.xtoken.slices import ChunkSlice, SideRows


@dataclass(frozen=True)
class ChunkDistribution:
    """Distributions of one model, on the columns of all ranks; all logarithms."""

    base: Tensor  # [c, tp * w] ln p of the base row; about LOWEST if the column is not real
    chain: Tensor  # [c] b
    normaliser: Tensor  # [n] ln sum exp(z / T) of each row

    @property
    def logs(self) -> Tensor:
        """ln P, [c, tp * w]."""
        return self.base + self.chain[:, None]


def chunk_distributions(
    student: Tensor, teacher: Tensor, piece: ChunkSlice, call: LossCall
) -> tuple[ChunkDistribution, ChunkDistribution]:
    """Return both models' distributions from the logits [n, w_s], [m, w_t].

    Tensor-parallel group: one all-gather of [c, w_s + w_t] numbers.
    """
    ours = _local("s_", student, piece.student, call.student_real, call)
    theirs = _local("t_", teacher, piece.teacher, call.teacher_real, call)
    gathered = call.gather(**ours, **theirs)
    return _merged(gathered, "s_", piece.student), _merged(gathered, "t_", piece.teacher)


def _local(prefix: str, logits: Tensor, side: SideRows, real: Tensor, call: LossCall) -> dict[str, Tensor]:
    values = call.scaled(logits)
    columns = call.local_columns(side.places, real.shape[0])
    return {
        prefix + "sums": log_sum_exp(values, real),
        prefix + "found": at_columns(values, columns)[side.others],
        prefix + "base": values[side.base].masked_fill(~real, LOWEST),
    }


def _merged(gathered: dict[str, Tensor], prefix: str, side: SideRows) -> ChunkDistribution:
    normaliser = gathered[prefix + "sums"].logsumexp(dim=0)
    logs = gathered[prefix + "found"].amax(dim=0) - normaliser[side.others]
    chain = sum_segments(side.other_chunks, logs, len(side.base)).clamp_(max=0.0)
    base = gathered[prefix + "base"].movedim(0, 1).flatten(1) - normaliser[side.base][:, None]
    return ChunkDistribution(base, chain, normaliser)


def write_chain_gradient(
    student: Tensor,  # [n, w_s] logits, overwritten
    of_base: Tensor,  # [c, tp * w_s] gradient by z / T of the base rows
    of_chain: Tensor,  # [c] dL/db
    ours: ChunkDistribution,
    scale: Tensor,  # [c]
    piece: ChunkSlice,
    call: LossCall,
) -> None:
    """Write `of_base` into the base rows, (onehot - p) dL/db into the others, both times `scale`."""
    side, width, rank = piece.student, student.shape[1], call.vocabulary.rank
    result = call.scaled(student).sub(ours.normaliser[:, None]).exp_().masked_fill_(~call.student_real, 0.0)
    result.mul_(-of_chain[side.chunks][:, None])
    columns = call.local_columns(side.places[side.others], width)
    one_hot = of_chain[side.other_chunks].masked_fill(columns == width, 0.0)
    result.index_put_((side.others, columns.clamp(max=width - 1)), one_hot, accumulate=True)
    result[side.base] = of_base[:, rank * width : (rank + 1) * width]
    write_scaled(student, result, scale[side.chunks])
