"""A micro-batch in a cross-tokenizer teacher's tokens, and the chunks that tie them to the student's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from mkd.data.aligned.chunk_shard import range_owners, select_ranges, shard_chunks
from mkd.data.batch import as_row, cumulative, position_ids
from mkd.data.images.image_table import PackImages
from mkd.data.teacher_input import RowCut, TokenRow
from mkd.parallel.image_row import ImageRow
from mkd.xtoken.chunks import ChunkBatch, ChunkSide


@dataclass(frozen=True)
class PackChunks:
    """The kept chunks of one pack, in the order of the text.

    The rows that predict a chunk are consecutive on both sides.
    """

    student_rows: np.ndarray  # [c] int64, row of the pack that predicts the first student token
    student_counts: np.ndarray  # [c] int64, student tokens
    teacher_rows: np.ndarray  # [c] int64, row of the teacher's pack that predicts the first teacher token
    teacher_counts: np.ndarray  # [c] int64, teacher tokens
    kinds: np.ndarray  # [c] int8
    support_counts: np.ndarray  # [c] int64, pairs of each chunk
    support_student: np.ndarray  # [p] int64, student ids
    support_teacher: np.ndarray  # [p] int64, teacher ids

    def __len__(self) -> int:
        return len(self.kinds)

    @classmethod
    def empty(cls) -> PackChunks:
        """Return the chunks of a pack that has none."""
        none = np.zeros(0, dtype=np.int64)
        return cls(none, none, none, none, none.astype(np.int8), none, none, none)


@dataclass(frozen=True)
class TeacherPack:
    """One pack in a teacher's tokens: the student's documents in the same order, as far as there is room."""

    tokens: np.ndarray  # [s'] int64
    labels: np.ndarray  # [s'] int64, the next token of the same document, 0 where there is none
    lengths: np.ndarray  # [documents] int64, tokens without padding
    spans: np.ndarray  # [documents] int64, tokens with padding; their sum is s'
    chunks: PackChunks
    images: PackImages | None = None  # None: the corpus has no images

    def collate(self, others: Sequence[TeacherPack], student_labels: np.ndarray) -> TeacherBatch:
        """Join this pack and `others`, the following ones, into one micro-batch."""
        return collate_teacher((self, *others), student_labels)


def empty_teacher_pack(seq_length: int, pad_id: int) -> TeacherPack:
    """Return a pack of padding alone."""
    return TeacherPack(
        tokens=np.full(seq_length, pad_id, dtype=np.int64),
        labels=np.zeros(seq_length, dtype=np.int64),
        lengths=np.zeros(1, dtype=np.int64),
        spans=np.array([seq_length]),
        chunks=PackChunks.empty(),
    )


@dataclass(frozen=True)
class TeacherBatch:
    """k packs as one THD row of k * s' teacher tokens, or the t' of them on one context-parallel rank.

    Documents and padding are as in PackedBatch; documents without a teacher token are missing.
    """

    tokens: Tensor  # [1, t'] int64
    position_ids: Tensor  # [1, t'] int64, from 0 in every document
    cu_seqlens: Tensor  # [documents + 1] int32, without padding
    cu_seqlens_padded: Tensor  # [documents + 1] int32, the last is k * s'
    max_seqlen: int  # largest span of a document, tokens
    chunks: ChunkBatch  # the chunks that this context-parallel rank owns
    images: ImageRow | None = None  # of the teacher, as in PackedBatch

    stays_on_host: ClassVar[bool] = False

    def cut(self, cut: RowCut) -> TeacherBatch:
        """Return the part of a whole row in the shard of `cut`, with the chunks that its process owns.

        The row is cut by the teacher's own spans.
        """
        held = cut.shard.rows(self.cu_seqlens_padded)
        sharded = {name: getattr(self, name)[:, held] for name in ("tokens", "position_ids")}
        chunks = shard_chunks(self.chunks, cut.shard, cut.cu_seqlens_padded, self.cu_seqlens_padded)
        return replace(self, **sharded, chunks=chunks)

    def token_rows(self, student: TokenRow) -> tuple[TokenRow, ...]:
        """Return this row: the teacher reads its own tokens."""
        return (self,)


def collate_teacher(
    packs: Sequence[TeacherPack],
    student_labels: np.ndarray,  # [k * s] int64, labels of the student's packs one after the other
) -> TeacherBatch:
    """Lay the packs one after the other as one micro-batch."""
    lengths = np.concatenate([pack.lengths for pack in packs])
    spans = np.concatenate([pack.spans for pack in packs])
    teacher_labels = np.concatenate([pack.labels for pack in packs])
    return TeacherBatch(
        tokens=as_row(np.concatenate([pack.tokens for pack in packs])),
        position_ids=position_ids(spans),
        cu_seqlens=cumulative(lengths),
        cu_seqlens_padded=cumulative(spans),
        max_seqlen=int(spans.max()),
        chunks=_collate_chunks([pack.chunks for pack in packs], student_labels, teacher_labels),
    )


def _collate_chunks(
    parts: Sequence[PackChunks], student_labels: np.ndarray, teacher_labels: np.ndarray
) -> ChunkBatch:
    """Join the chunks of all packs, sorted by kind and then in the order of the text."""
    packs = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    joined = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts])
        for field in fields(PackChunks)
    }
    order = np.argsort(joined["kinds"], kind="stable")
    sides = {}
    for name, labels in (("student", student_labels), ("teacher", teacher_labels)):
        first_rows = joined[f"{name}_rows"] + packs * (len(labels) // len(parts))
        sides[name] = _side(first_rows[order], joined[f"{name}_counts"][order], labels)
    all_offsets = np.concatenate([[0], np.cumsum(joined["support_counts"])])
    pairs, support_offsets = select_ranges(all_offsets, order)
    return ChunkBatch(
        **sides,
        kinds=joined["kinds"][order],
        weights=torch.ones(len(order), dtype=torch.float32),
        packs=torch.from_numpy(packs[order]),
        support_offsets=support_offsets,
        support_chunks=torch.from_numpy(range_owners(support_offsets)),
        support_student=torch.from_numpy(joined["support_student"][pairs]),
        support_teacher=torch.from_numpy(joined["support_teacher"][pairs]),
        num_chunks=len(order),
        pack_chunks=tuple(len(part) for part in parts),
    )


def _side(first_rows: np.ndarray, counts: np.ndarray, labels: np.ndarray) -> ChunkSide:
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    rows = np.arange(offsets[-1]) + np.repeat(first_rows - offsets[:-1], counts)
    return ChunkSide(
        rows=torch.from_numpy(rows),
        labels=torch.from_numpy(labels[rows]),
        offsets=torch.from_numpy(offsets),
        host_offsets=offsets,
    )
