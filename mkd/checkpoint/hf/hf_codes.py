"""Read codes and scales of quantised matrices as a Hugging Face folder stores them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mkd.checkpoint.hf.hf_names import Piece
from mkd.checkpoint.hf.hf_reader import HFCheckpoint


def read_codes(
    checkpoint: HFCheckpoint,
    pieces: Sequence[Piece],  # of a matrix that no rank cuts
    codes: Tensor,  # uint8 [out, ...], to be filled
    scales: Tensor,  # [blocks of rows, ...], to be filled
) -> None:
    """Fill codes and scales of one matrix. Raises `CheckpointError` for tensors of another form."""
    for piece in pieces:
        of_part = checkpoint.read_codes(piece.tensor, piece.tensor_cut)
        for part, target in zip(of_part, (codes, scales), strict=True):
            _rows_of(piece, target, len(codes)).copy_(_in_order(piece, part))


def _rows_of(piece: Piece, target: Tensor, rows: int) -> Tensor:
    """Return the rows of codes or scales that belong to the piece of a matrix with so many rows."""
    if piece.stack is not None:
        return target.unflatten(0, (piece.stack.interleaved, -1))
    first, last, _ = piece.shard_cut[0].indices(rows)
    block = -(-rows // len(target))  # rows of the matrix that share one of the target
    return target[first // block : -(-last // block)]


def _in_order(piece: Piece, part: Tensor) -> Tensor:
    """Return rows as the matrix has them: a stack may have gates and up projections in turns."""
    return part if piece.stack is None else part.unflatten(0, (-1, piece.stack.interleaved)).transpose(0, 1)
