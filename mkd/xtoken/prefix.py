"""prefix_kl: divergence over what the text goes on with, token by token that both vocabularies know.

A token without a twin counts as the common token that it begins with: where the teacher may say " configuration" and the
student only " config", the student's " config" is to be as likely as all that the teacher may say beginning with it. Both sides
have read the same bytes where a chunk starts, so every chunk is compared at its first tokens; a chunk of several tokens also by
its realised chain, as in partition_kl. The classes cover both vocabularies (control tokens of one side alone are
the rest): for identical tokenizers it is the plain divergence.
"""

from __future__ import annotations

from torch import Tensor

from mkd.xtoken.chains import chains
from mkd.xtoken.chunks import ONE_TO_ONE
from mkd.xtoken.loss_call import LossCall
from mkd.xtoken.projected import projected
from mkd.xtoken.slices import ChunkSlice


def prefix_kl(
    student: Tensor, teacher: Tensor, scale: Tensor | None, piece: ChunkSlice, call: LossCall
) -> Tensor:
    """Values [c] from the logits [n, w_s], [m, w_t]; with `scale` [c] the student's become scale * dL/d(z/T).

    Tensor-parallel group: the communication of `projected`, and that of `chains` for chunks of several tokens.
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
