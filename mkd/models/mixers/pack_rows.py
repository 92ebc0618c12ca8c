"""The documents of a pack's rows, and the exchange of rows for blocks of channels.

A mixer needs the tokens of a document in a row. With context parallelism a rank holds a part of each
document, so ranks trade rows for channels: all rows of a block of heads come to one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mkd.models.packed import PackedDocuments
from mkd.parallel.zigzag import RowShard

CHUNK = 64  # tokens of a chunk of fused kernels


@dataclass(frozen=True)
class Segments:
    """The documents of a pack of t tokens, in the form that fused kernels take. Some may have no tokens."""

    borders: Tensor  # [documents + 1] int64, from 0 to t
    chunks: Tensor  # [n, 2] int64, the document of each chunk, and its number there

    @classmethod
    def of(cls, borders: Tensor, tokens: int) -> Segments:
        """Return the segments; chunks of `CHUNK` tokens begin with a document.

        There are t / CHUNK + documents chunks at most, and so many are listed: those beyond the documents are
        chunks of the first one, far behind its end. The host does not wait for the device.
        """
        most = tokens // CHUNK + borders.numel() - 1
        behind = (-(-borders.diff() // CHUNK)).cumsum(0)  # [documents], number of the chunk behind each
        chunk = torch.arange(most, device=borders.device)
        document = torch.searchsorted(behind, chunk, right=True)
        is_chunk = document < behind.numel()
        document = torch.where(is_chunk, document, 0)
        first = torch.where(document > 0, behind[document - 1], 0)
        number = torch.where(is_chunk, chunk - first, tokens)
        return cls(borders, torch.stack((document, number), dim=1))


@dataclass(frozen=True)
class PackRows:
    """The rows of one whole pack of t tokens, padding included."""

    borders: Tensor  # [documents + 1] int64, of documents with their padding, from 0 to t
    documents: Tensor  # [t] int64, index of each row's document; padding belongs to the document before it
    positions: Tensor  # [t] int64, place of each row in its document
    held: Tensor  # [t] int64, the rows of the first shard, of the second ..
    order: Tensor  # [t] int64, inverse of `held`

    @cached_property
    def segments(self) -> Segments:
        """The documents for fused kernels. They keep what they derive from the same tensors."""
        return Segments.of(self.borders, self.documents.numel())


def pack_rows(packed: PackedDocuments, num_held: int, shards: int, device: torch.device) -> PackRows:
    """Return the rows of a pack of which each of `shards` processes holds `num_held`.

    All mixers that read the pack share them. The host does not wait for the device.
    """
    if packed.rows is None:
        borders = packed.cu_seqlens_q_padded.to(device)
        documents, positions = RowShard().places(borders, num_held * shards)
        held = []
        for rank in range(shards):
            document, position = RowShard(rank, shards).places(borders, num_held)
            held.append(borders[document] + position)
        rows = torch.cat(held).long()
        whole = F.pad(borders[:-1].long(), (0, 1), value=num_held * shards)
        packed.rows = PackRows(whole, documents, positions, rows, rows.argsort())
    return packed.rows


def rows_to_channels(x: Tensor, rows: PackRows, group: dist.ProcessGroup) -> Tensor:
    """Return all rows of this rank's channels, in document order: [t/cp, w] -> [t, w/cp].

    All-to-all over context parallel. Backward: the reverse all-to-all.
    """
    parts = x.unflatten(1, (group.size(), -1)).transpose(0, 1)
    return _AllToAll.apply(parts, group).flatten(0, 1)[rows.order]


def channels_to_rows(x: Tensor, rows: PackRows, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's rows of all channels, the inverse of `rows_to_channels`: [t, w/cp] -> [t/cp, w]."""
    parts = x[rows.held].unflatten(0, (group.size(), -1))
    return _AllToAll.apply(parts, group).transpose(0, 1).flatten(1)


class _AllToAll(torch.autograd.Function):
    """[cp, ...] -> [cp, ...]: part i goes to rank i, and part i of the result comes from rank i."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradient, ctx.group), None


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = parts.contiguous()  # `empty_like` of a transposed view would be transposed too
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received
