"""One pack (numpy, as read) and one micro-batch of packs (torch, as the models take it)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mkd.data.images.image_table import PackImages
from mkd.data.teacher_input import PackPart, RowCut, TeacherInput
from mkd.parallel.host_row import HostRow
from mkd.parallel.image_row import ImageRow
from mkd.parallel.tensor_records import map_tensors
from mkd.parallel.zigzag import RowShard

PAIR_NUMBER, ADVANTAGE, SAMPLED_LOGP = "pair", "advantage", "sampled_logp"  # names of row values
RECORD = "record."  # names of row values that records give begin with it: record.KEY


def as_row(values: np.ndarray) -> Tensor:
    """Return `values` [t] as a tensor [1, t]."""
    return torch.from_numpy(values)[None]


def cumulative(lengths: np.ndarray) -> Tensor:
    """Return the borders of documents as packed attention takes them, int32 [documents + 1].

    `lengths` [documents] are their tokens.
    """
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def position_ids(spans: np.ndarray) -> Tensor:
    """Return positions that start at 0 in every document of `spans` [documents] tokens, int64 [1, t]."""
    return as_row(np.arange(spans.sum()) - np.repeat(np.cumsum(spans) - spans, spans))


@dataclass(frozen=True)
class Pack:
    """`seq_length` tokens made of documents (or pieces of them), each followed by its padding."""

    tokens: np.ndarray  # [s] int64
    labels: np.ndarray  # [s] int64, the next token of the same document, 0 where there is none
    loss_mask: np.ndarray  # [s] float32, 1 where the label counts
    lengths: np.ndarray  # [documents] int64, tokens without padding
    spans: np.ndarray  # [documents] int64, tokens with padding; their sum is s
    sample_id: int  # number of the pack in its data set, -1 for an empty pack
    teacher_inputs: tuple[PackPart, ...] = ()  # one for every teacher
    images: PackImages | None = None  # None: the corpus has no images
    row_values: Mapping[str, np.ndarray] = field(default_factory=dict)  # name -> [s], see `PackedBatch`
    num_pairs: int = 0  # preference pairs
    tag: int = -1  # number of its documents' tag, -1 without one


@dataclass(frozen=True)
class PackedBatch:
    """k packs as one THD row of k * seq_length tokens, or the t of them on one context-parallel rank.

    Document i lies at [cu_seqlens_padded[i], cu_seqlens_padded[i+1]) of the row and has cu_seqlens[i+1] -
    cu_seqlens[i] tokens; the rest of its span is padding, which has no loss. A pack's unused tail is padding
    of its last document.
    """

    tokens: Tensor  # [1, t] int64
    labels: Tensor  # [1, t] int64
    loss_mask: Tensor  # [1, t] float32
    position_ids: Tensor  # [1, t] int64, from 0 in every document
    cu_seqlens: Tensor  # [documents + 1] int32, without padding
    cu_seqlens_padded: Tensor  # [documents + 1] int32, the last is k * seq_length
    max_seqlen: int  # largest span of a document, tokens
    loss_rows: Tensor  # [n] int64, ascending: the positions of the t whose loss_mask is not 0
    num_loss_tokens: int  # loss tokens of the whole row
    sample_ids: tuple[int, ...]  # numbers of the packs, -1 for empty ones
    teacher_inputs: tuple[TeacherInput, ...] = ()  # one for every teacher
    images: ImageRow | None = None  # None: a batch of text alone; else built for this rank, never cut again
    row_values: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> [1, t], what terms of the loss know about each token besides its label.

    `pair` (int64) numbers the preference pairs from 1: positive for tokens of the chosen document, negative
    for those of the rejected one, 0 elsewhere. `advantage` and `sampled_logp` (float32) are those of the
    label, if the student has sampled it. `record.KEY` (float32) is the number KEY of the document's record.
    """
    row_sums: Mapping[str, float] = field(default_factory=dict)
    """Name -> sum of a row value over the loss tokens of the whole row, of numbers of records."""
    num_pairs: int = 0  # preference pairs of the whole row
    tags: tuple[int, ...] = ()  # number of each pack's tag, -1 without one
    pack_loss_tokens: tuple[int, ...] = ()  # loss tokens of each pack
    pack_loss_rows: tuple[int, ...] = ()  # those of `loss_rows` in each pack: of this rank
    host_rows: tuple[HostRow, ...] = ()  # whole rows of the teachers on processes of their own, in order
    needed_teachers: tuple[bool, ...] = ()  # whether each teacher is needed; (): all are

    def needs_teacher(self, number: int) -> bool:
        """Return True if a loss reads the state of the teacher of that number."""
        return not self.needed_teachers or self.needed_teachers[number]

    def loss_rows_of(self, packs: Sequence[int]) -> Tensor:
        """Return the `loss_rows` that lie in the packs of these numbers, ascending."""
        parts = self.loss_rows.split(self.pack_loss_rows)
        return torch.cat([self.loss_rows[:0], *(parts[number] for number in packs)])

    def of_loss_rows(self, name: str) -> Tensor:
        """Return a row value of each loss row, [n]; fp32 zeros in a batch of padding, which has none."""
        if name not in self.row_values:
            return self.loss_mask.new_zeros(len(self.loss_rows))
        return self.row_values[name][0, self.loss_rows]

    def to(self, device: torch.device | str) -> PackedBatch:
        """Return the batch on `device`, except what `stays_on_host`; from pinned memory no copy blocks."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        parts = self.teacher_inputs
        inputs = tuple(part if part.stays_on_host else map_tensors(part, move) for part in parts)
        return replace(map_tensors(replace(self, teacher_inputs=()), move), teacher_inputs=inputs)

    def pin_memory(self) -> PackedBatch:
        """Return the batch in page-locked memory."""
        return map_tensors(self, Tensor.pin_memory)

    def shard(self, shard: RowShard) -> PackedBatch:
        """Return the part of a whole row in `shard`.

        Document borders and counts stay those of the whole row. Every span must be a multiple of 2 * size.
        """
        if shard.is_whole:
            return self
        rows = shard.rows(self.cu_seqlens_padded)
        sharded = {
            name: getattr(self, name)[:, rows] for name in ("tokens", "labels", "loss_mask", "position_ids")
        }
        loss_rows = _loss_rows(sharded["loss_mask"])
        loss_places = torch.searchsorted(self.loss_rows, rows[loss_rows])
        cut = RowCut(shard, self.cu_seqlens_padded, loss_places)
        return replace(
            self,
            **sharded,
            loss_rows=loss_rows,
            pack_loss_rows=_by_pack(sharded["loss_mask"], len(self.sample_ids)),
            row_values={name: values[:, rows] for name, values in self.row_values.items()},
            teacher_inputs=tuple(part.cut(cut) for part in self.teacher_inputs),
        )

    def with_host_rows(self, teachers: Sequence[int]) -> PackedBatch:
        """Return the batch, which is whole and on the host, with the rows of these teachers."""
        own: Any = self
        rows = [self.teacher_inputs[number].token_rows(own)[0] for number in teachers]
        return replace(self, host_rows=tuple(HostRow.of(row) for row in rows))

    def with_teacher_images(self, number: int, images: ImageRow) -> PackedBatch:
        """Return the batch with this rank's images of the cross-tokenizer teacher `number`."""
        inputs: list[Any] = list(self.teacher_inputs)
        inputs[number] = replace(inputs[number], images=images)
        return replace(self, teacher_inputs=tuple(inputs))


def empty_pack(seq_length: int, pad_id: int) -> Pack:
    """Return a pack of padding alone: one document without tokens, no loss.

    It fills up the last step of an evaluation.
    """
    return Pack(
        tokens=np.full(seq_length, pad_id, dtype=np.int64),
        labels=np.zeros(seq_length, dtype=np.int64),
        loss_mask=np.zeros(seq_length, dtype=np.float32),
        lengths=np.zeros(1, dtype=np.int64),
        spans=np.array([seq_length]),
        sample_id=-1,
    )


def collate(packs: Sequence[Pack]) -> PackedBatch:
    """Lay the packs one after the other as one micro-batch."""
    lengths = np.concatenate([pack.lengths for pack in packs])
    spans = np.concatenate([pack.spans for pack in packs])
    labels = np.concatenate([pack.labels for pack in packs])
    loss_mask = as_row(np.concatenate([pack.loss_mask for pack in packs]))
    of_teachers = zip(*(pack.teacher_inputs for pack in packs), strict=True)
    row_values = _joined_row_values(packs)
    of_packs = tuple(int(np.count_nonzero(pack.loss_mask)) for pack in packs)  # of any lengths
    weighed = {name: loss_mask * values for name, values in row_values.items() if name.startswith(RECORD)}
    return PackedBatch(
        tokens=as_row(np.concatenate([pack.tokens for pack in packs])),
        labels=as_row(labels),
        loss_mask=loss_mask,
        position_ids=position_ids(spans),
        cu_seqlens=cumulative(lengths),
        cu_seqlens_padded=cumulative(spans),
        max_seqlen=int(spans.max()),
        loss_rows=_loss_rows(loss_mask),
        num_loss_tokens=int(np.count_nonzero(loss_mask)),
        sample_ids=tuple(pack.sample_id for pack in packs),
        teacher_inputs=tuple(first.collate(others, labels) for first, *others in of_teachers),
        row_values=row_values,
        row_sums={name: float(values.sum(dtype=torch.float64)) for name, values in weighed.items()},
        num_pairs=sum(pack.num_pairs for pack in packs),
        tags=tuple(pack.tag for pack in packs),
        pack_loss_tokens=of_packs,
        pack_loss_rows=of_packs,
    )


def _joined_row_values(packs: Sequence[Pack]) -> dict[str, Tensor]:
    """Return the row values of all packs, 0 in packs without them, with pairs numbered over all packs."""
    kinds = {name: values.dtype for pack in packs for name, values in pack.row_values.items()}
    found = {}
    for name, dtype in kinds.items():
        parts, pairs = [], 0
        for pack in packs:
            values = pack.row_values.get(name, np.zeros(len(pack.tokens), dtype))
            parts.append(values + np.sign(values) * pairs if name == PAIR_NUMBER else values)
            pairs += pack.num_pairs
        found[name] = as_row(np.concatenate(parts))
    return found


def _by_pack(loss_mask: Tensor, num_packs: int) -> tuple[int, ...]:
    """Return the number of loss rows of each pack; `loss_mask` [1, t] is that of whole packs or of shards."""
    return tuple(loss_mask.view(num_packs, -1).count_nonzero(dim=1).tolist())


def _loss_rows(loss_mask: Tensor) -> Tensor:
    return loss_mask[0].nonzero().flatten()
