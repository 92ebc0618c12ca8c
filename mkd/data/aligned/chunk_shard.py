"""Chunks of a row under context parallelism: each chunk's owner, and the rows that ranks send each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mkd.parallel.zigzag import RowShard
from mkd.xtoken.chunks import ChunkBatch, ChunkSide, RowExchange


def shard_chunks(
    chunks: ChunkBatch,  # all chunks of the row
    shard: RowShard,
    student_cu_seqlens_padded: Tensor,  # [documents + 1] int32, of the whole row
    teacher_cu_seqlens_padded: Tensor,  # [documents + 1] int32
) -> ChunkBatch:
    """Return the chunks that the process of `shard` owns: those whose last student predictor it holds.

    Both sides have an exchange on every rank, even if a rank has nothing to send, because all ranks join it.
    """
    rank, places = shard.rank, _Places(student_cu_seqlens_padded, shard.size)
    owners = places.ranks[chunks.student.rows.numpy()[chunks.student.host_offsets[1:] - 1]]
    owned = np.flatnonzero(owners == rank)
    pairs, support_offsets = select_ranges(chunks.support_offsets, owned)
    pairs = torch.from_numpy(pairs)
    return replace(
        chunks,
        student=_shard_side(chunks.student, owners, rank, places),
        teacher=_shard_side(chunks.teacher, owners, rank, _Places(teacher_cu_seqlens_padded, shard.size)),
        kinds=chunks.kinds[owned],
        weights=chunks.weights[owned],
        packs=chunks.packs[owned],
        support_offsets=support_offsets,
        support_chunks=torch.from_numpy(range_owners(support_offsets)),
        support_student=chunks.support_student[pairs],
        support_teacher=chunks.support_teacher[pairs],
    )


def select_ranges(offsets: np.ndarray, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (entries, offsets) int64 of the ranges `which` of compressed rows with `offsets` [n + 1]."""
    counts = np.diff(offsets)[which]
    selected = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return np.arange(selected[-1]) + np.repeat(offsets[which] - selected[:-1], counts), selected


def range_owners(offsets: np.ndarray) -> np.ndarray:
    """Return the number of the range that each entry is in, int64 [offsets[-1]]."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


class _Places:
    """The rank of each position of a whole row, and its row on that rank."""

    def __init__(self, cu_seqlens_padded: Tensor, size: int):
        self.size = size
        self.ranks = np.empty(int(cu_seqlens_padded[-1]), dtype=np.int64)  # [t]
        self.rows = np.empty_like(self.ranks)  # [t]
        for rank in range(size):
            held = RowShard(rank, size).rows(cu_seqlens_padded).numpy()
            self.ranks[held], self.rows[held] = rank, np.arange(len(held))


def _shard_side(side: ChunkSide, owners: np.ndarray, rank: int, places: _Places) -> ChunkSide:
    """Return the owned tokens with the plan that brings the rows of their predictors to this rank.

    A rank sends to each destination, and receives from each source, in the order of the chunks of the whole
    row. So both ends of a transfer agree without communication.
    """
    rows = side.rows.numpy()
    sources = places.ranks[rows]
    destinations = owners[range_owners(side.host_offsets)]
    sent = np.flatnonzero(sources == rank)
    sent = sent[np.argsort(destinations[sent], kind="stable")]
    tokens, offsets = select_ranges(side.host_offsets, np.flatnonzero(owners == rank))
    arrivals = np.argsort(sources[tokens], kind="stable")
    received = np.empty(len(tokens), dtype=np.int64)
    received[arrivals] = np.arange(len(tokens))
    exchange = RowExchange(
        send_rows=torch.from_numpy(places.rows[rows[sent]]),
        send_counts=tuple(np.bincount(destinations[sent], minlength=places.size).tolist()),
        receive_counts=tuple(np.bincount(sources[tokens], minlength=places.size).tolist()),
    )
    return ChunkSide(
        rows=torch.from_numpy(received),
        labels=side.labels[torch.from_numpy(tokens)],
        offsets=torch.from_numpy(offsets),
        host_offsets=offsets,
        exchange=exchange,
    )
