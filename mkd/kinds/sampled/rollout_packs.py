"""Completions as packs for training. Their ids are those that were sampled: no text is encoded again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from mkd.data.batch import ADVANTAGE, SAMPLED_LOGP, Pack, PackedBatch, empty_pack
from mkd.data.packing.best_fit import pack_pieces
from mkd.data.packing.cutting import padded_lengths
from mkd.kinds.sampled.rollout_teachers import NOTHING, RolloutTeacher
from mkd.kinds.sampled.sampler.rollouts import Rollout
from mkd.parallel.zigzag import RowShard
from mkd.xtoken.align.align_text import AlignedText

QUARTERS = 4  # parts of a completion in which the divergence is measured


@dataclass(frozen=True)
class RolloutRows:
    """Quarter and sampled ln p of the loss rows of a pack or micro-batch, in their order."""

    quarter: np.ndarray  # [n] int64, part of the completion from 0 to 3; -1 for stored text
    logp: np.ndarray  # [n] float32, ln p of the label as the sampler computed it; 0 for stored text

    @classmethod
    def stored(cls, count: int) -> RolloutRows:
        return cls(np.full(count, -1), np.zeros(count, dtype=np.float32))

    def held(self, batch: PackedBatch, shard: RowShard) -> RolloutRows:
        """Return the rows that a context-parallel process holds of a whole micro-batch."""
        if shard.is_whole:
            return self
        places = shard.rows(batch.cu_seqlens_padded)
        has_loss = batch.loss_mask[0, places] != 0
        rows = torch.searchsorted(batch.loss_rows, places[has_loss]).numpy()
        return RolloutRows(self.quarter[rows], self.logp[rows])

    @classmethod
    def joined(cls, parts: Sequence[RolloutRows]) -> RolloutRows:
        """Return the rows of several packs, one after the other."""
        empty = cls.stored(0)
        columns = zip(*((one.quarter, one.logp) for one in (empty, *parts)), strict=True)
        return cls(*(np.concatenate(column) for column in columns))


@dataclass(frozen=True)
class RolloutPacks:
    """The packs of the completions of a step, equal on all ranks; each is built when it is asked for."""

    packs: Sequence[Sequence[Rollout]]  # documents of each
    aligned: Sequence[Sequence[Sequence[AlignedText]]]  # of each teacher, pack and document
    seq_length: int
    pad_id: int
    teachers: Sequence[RolloutTeacher]
    multiple: int = 1  # documents are padded to a multiple of it
    tags: np.ndarray | None = None  # [packs] int64, number of each pack's tag; None: they have none

    @classmethod
    def fill(
        cls,
        rollouts: Sequence[Rollout],
        seq_length: int,
        pad_id: int,
        teachers: Sequence[RolloutTeacher],
        tags: np.ndarray | None = None,  # [rollouts] int64: a pack holds completions of one tag
        taught: Sequence[frozenset[int]] = (),  # tags of each of `teachers`; (): all
        multiple: int = 1,  # documents are padded to a multiple of it
    ) -> RolloutPacks:
        """Put the completions into packs: best fit decreasing.

        A completion takes the share of a pack that it needs in the tokens of the student or of a teacher,
        the larger one, so that no teacher lacks room for what fits into one of its packs.
        """
        lengths = np.array([len(one.request.ids) + len(one.ids) for one in rollouts], dtype=np.int64)
        numbers = [None] * len(rollouts) if tags is None else tags.tolist()
        aligned = [
            [
                teacher.align(one) if number is None or number in own else NOTHING
                for one, number in zip(rollouts, numbers, strict=True)
            ]
            for teacher, own in zip(teachers, taught or [frozenset()] * len(teachers), strict=True)
        ]
        for teacher, documents in zip(teachers, aligned, strict=True):
            theirs = np.array([len(one.teacher_ids) for one in documents], dtype=np.int64)
            theirs = padded_lengths(theirs, multiple)
            lengths = np.maximum(lengths, -(-theirs * seq_length // teacher.seq_length))
        lengths = padded_lengths(lengths, multiple)
        filled = pack_pieces(np.minimum(lengths, seq_length), seq_length, "bfd", tags=tags)
        pieces = [filled.pieces_of(number).tolist() for number in range(len(filled))]
        packs = [[rollouts[i] for i in numbers] for numbers in pieces]
        of_teachers = [[[one[i] for i in numbers] for numbers in pieces] for one in aligned]
        of_packs = None if tags is None else tags[[numbers[0] for numbers in pieces]]
        return cls(packs, of_teachers, seq_length, pad_id, teachers, multiple, of_packs)

    def __len__(self) -> int:
        return len(self.packs)

    def build(self, number: int, sample_id: int) -> tuple[Pack, RolloutRows]:
        """Return a pack: loss on the sampled tokens, each predicted by the token before it."""
        pack, parts, start, starts = empty_pack(self.seq_length, self.pad_id), [], 0, []
        advantage, logp = np.zeros((2, self.seq_length), dtype=np.float32)
        for one in self.packs[number]:
            starts.append(start)
            ids, count = np.concatenate([one.request.ids, one.ids]), one.num_sampled
            sampled = slice(None) if one.loss is None else one.loss
            end, first = start + len(ids), start + len(one.request.ids) - 1
            pack.tokens[start:end] = ids
            pack.labels[start : end - 1] = ids[1:]
            pack.loss_mask[first : end - 1] = 1 if one.loss is None else one.loss
            advantage[first : end - 1], logp[first : end - 1] = one.advantage, one.logp
            parts.append(RolloutRows(np.arange(count) * QUARTERS // count, one.logp[sampled]))
            start = int(padded_lengths(np.int64(end), self.multiple))
        lengths = np.array([len(one.request.ids) + len(one.ids) for one in self.packs[number]])
        spans = padded_lengths(lengths, self.multiple)
        spans[-1] += self.seq_length - start
        judged = {ADVANTAGE: advantage, SAMPLED_LOGP: logp}
        inputs = tuple(
            teacher.pack(documents[number], starts, pack)
            for teacher, documents in zip(self.teachers, self.aligned, strict=True)
        )
        pack = replace(
            pack, lengths=lengths, spans=spans, sample_id=sample_id, row_values=judged, teacher_inputs=inputs
        )
        if self.tags is not None:
            pack = replace(pack, tag=int(self.tags[number]))
        return pack, RolloutRows.joined(parts)

    def empty(self) -> Pack:
        """Return a pack of padding, for the teachers of the run."""
        pack = empty_pack(self.seq_length, self.pad_id)
        return replace(pack, teacher_inputs=tuple(one.pack((), (), pack) for one in self.teachers))
