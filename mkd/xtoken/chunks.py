"""Aligned chunks of a micro-batch as index tensors, which the loader hands to the chunk losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from torch import Tensor

T = TypeVar("T")
KINDS = ONE_TO_ONE, ONE_TO_MANY, MANY_TO_ONE, MANY_TO_MANY = range(4)
"""Kind of a chunk by its number of student and teacher tokens."""


@dataclass(frozen=True)
class RowExchange:
    """Rows of hidden states that context-parallel ranks exchange, so that each chunk's owner has its rows."""

    send_rows: Tensor  # [sum of send_counts] int64, rows of this rank, by destination
    send_counts: tuple[int, ...]  # rows for each rank of the group, this one included
    receive_counts: tuple[int, ...]  # rows from each rank


@dataclass(frozen=True)
class ChunkSide:
    """One model's tokens of the chunks, in order: chunk i has the tokens [offsets[i], offsets[i + 1])."""

    rows: Tensor  # [n] int64, position that predicts the token, in this rank's row or the exchanged rows
    labels: Tensor  # [n] int64, the token itself, an id of this model's tokenizer
    offsets: Tensor  # [c + 1] int64
    host_offsets: np.ndarray  # [c + 1] int64, the same, for decisions on the host
    exchange: RowExchange | None = None  # None: every row is on this rank


@dataclass(frozen=True)
class ChunkBatch:
    """The chunks that this rank owns, sorted by kind.

    Chunks other than 1-1 list their support: pairs (student id, teacher id) of last tokens that spell the
    same bytes after the realised tokens before them. The realised pair is one of them; within a chunk no id
    comes twice on its side. The support of a 1-1 chunk is the whole common vocabulary, and is not listed.
    """

    student: ChunkSide
    teacher: ChunkSide
    kinds: np.ndarray  # [c] int8, ascending
    weights: Tensor  # [c] float32
    packs: Tensor  # [c] int64, pack of the micro-batch that the chunk is in
    support_offsets: np.ndarray  # [c + 1] int64, on the host
    support_chunks: Tensor  # [p] int64, ascending
    support_student: Tensor  # [p] int64, student id
    support_teacher: Tensor  # [p] int64, teacher id
    num_chunks: int  # of the whole packed row, those of other context-parallel ranks included
    pack_chunks: tuple[int, ...] = ()  # the same of each pack
