"""The images of a micro-batch's row, as one rank takes them, and their positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mkd.data.aligned.teacher_batch import TeacherBatch, TeacherPack
from mkd.data.batch import Pack, PackedBatch
from mkd.data.images.conversation import ConversationImages
from mkd.data.images.image_table import grids_of
from mkd.parallel.context import ParallelContext
from mkd.parallel.image_row import Grid, ImageRow, deal_images, held_rows, image_row, num_patches
from mkd.parallel.zigzag import RowShard

RowImages = Callable[..., ImageRow]
"""Returns this rank's images of packs, of their whole row, for a `shard`."""


@dataclass(frozen=True)
class ImageLayout:
    """One rank's share of the images of a row."""

    rank: int = 0  # in the group of ranks that share a row
    ranks: int = 1
    tensor_rank: int = 0
    tensor_size: int = 1  # ranks among which sequence parallelism cuts a row; 1 without it
    runs_tower: bool = True  # False on later pipeline stages: they get positions alone

    @classmethod
    def of_context(cls, context: ParallelContext, sequence_parallel: bool) -> ImageLayout:
        """Return the share of the rank of `context`."""
        tensor_rank, tensor_size = (context.tp_rank, context.tp_size) if sequence_parallel else (0, 1)
        place = context.row_rank, context.sizes.row
        return cls(*place, tensor_rank, tensor_size, runs_tower=context.pp_rank == 0)


def row_images_of(
    images: ConversationImages | None, context: ParallelContext, sequence_parallel: bool
) -> RowImages | None:
    """Return `images_of_row` for the rank of `context`; None if the models read no images."""
    layout = ImageLayout.of_context(context, sequence_parallel)
    return None if images is None else partial(images_of_row, images=images, layout=layout)


def images_of_row(
    packs: Sequence[Pack] | Sequence[TeacherPack],
    batch: PackedBatch | TeacherBatch,  # the packs as a whole row
    images: ConversationImages,
    layout: ImageLayout,
    shard: RowShard,
) -> ImageRow:
    """Return the images of a micro-batch for one rank, which decodes only its own.

    Raises DataError for an image that has changed since it was tokenised.
    """
    processor = images.processor
    placed = _placed(packs)
    positions = None
    if processor.has_mrope:
        positions = torch.from_numpy(_positions(batch, placed, processor.merge))
    fixed = dict(positions=positions, scale=processor.scale, shift=processor.shift)
    no_pixels = np.zeros((0, *processor.width), dtype=np.uint8)
    if not layout.runs_tower:
        none = torch.zeros(0, dtype=torch.int64)
        return ImageRow(torch.from_numpy(no_pixels), (), 0, none, none, **fixed)
    grids: list[Grid] = []
    owners: list[int] = []
    pixels, tokens = [no_pixels], batch.tokens[0].numpy()
    for pack in packs:
        if pack.images is None:
            continue
        of_pack = grids_of(pack.images.records)
        dealt = deal_images(of_pack, layout.ranks)
        for record, grid, owner in zip(pack.images.records, of_pack, dealt, strict=True):
            if owner == layout.rank:
                pixels.append(processor.pixels(pack.images.table.decode(record, images.source)))
                assert len(pixels[-1]) in (grid[0], num_patches(grid)), "pixels fit the tokenised size"
        grids, owners = grids + of_pack, owners + dealt
    is_image = [np.zeros(0, dtype=np.int64)]
    is_image += [
        place + np.flatnonzero(tokens[place : place + count] == processor.image_token_id)
        for place, count, _ in placed
    ]
    kept = _kept(batch.cu_seqlens_padded, layout, shard)
    own = torch.from_numpy(np.concatenate(pixels))
    return image_row(
        own,
        grids,
        owners,
        np.concatenate(is_image),
        processor.merge,
        rank=layout.rank,
        ranks=layout.ranks,
        kept=kept,
        **fixed,
    )


def _placed(packs: Sequence[Pack] | Sequence[TeacherPack]) -> list[tuple[int, int, Grid]]:
    """Return (first token in the row, tokens, grid) of each image."""
    found: list[tuple[int, int, Grid]] = []
    start = 0
    for pack in packs:
        if pack.images is not None:
            records = pack.images.records
            columns = (pack.images.starts + start).tolist(), records["tokens"].tolist(), grids_of(records)
            found += zip(*columns, strict=True)
        start += len(pack.tokens)
    return found


def _positions(
    batch: PackedBatch | TeacherBatch, placed: Sequence[tuple[int, int, Grid]], merge: int
) -> np.ndarray:
    """Return the rotary positions of the whole row, int64 [3, t]; each document starts at 0."""
    found = np.repeat(batch.position_ids.numpy(), 3, axis=0)
    borders = batch.cu_seqlens_padded.numpy()
    document_of = np.searchsorted(borders, [place for place, *_ in placed], side="right") - 1
    for document in np.unique(document_of).tolist():
        first, last = int(borders[document]), int(borders[document + 1])
        own = [placed[number] for number in np.flatnonzero(document_of == document)]
        images = [(place - first, grid) for place, _, grid in own]
        found[:, first:last] = rotary_positions(last - first, images, merge)
    return found


def _kept(borders: Tensor, layout: ImageLayout, shard: RowShard) -> Tensor | None:
    """Return the rows of the whole row that the rank holds, int64; None if it holds all."""
    if shard.is_whole and layout.tensor_size == 1:
        return None
    rows = shard.rows(borders)
    return held_rows(rows, layout.tensor_rank, layout.tensor_size) if layout.tensor_size > 1 else rows


def rotary_positions(
    num_tokens: int,  # of the document, padding included
    images: Iterable[tuple[int, Grid]],  # (first token, grid of patches) of each image, in order
    merge: int,  # patches side by side that make one token
) -> np.ndarray:
    """Return the positions of one document, int64 [3, num_tokens].

    A text token has one position three times. An image of h x w tokens that starts at p has (p, p + row,
    p + column); the text after it continues at p + max(h, w). Source: Qwen2-VL, Wang et al. 2024 (arXiv
    2409.12191), section 2.1.
    """
    found = np.empty((3, num_tokens), dtype=np.int64)
    done = position = 0
    for first, (_, rows, columns) in images:
        height, width = rows // merge, columns // merge
        found[:, done:first] = position + np.arange(first - done)
        position += first - done
        done = first + height * width
        found[0, first:done] = position
        found[1, first:done] = position + np.repeat(np.arange(height), width)
        found[2, first:done] = position + np.tile(np.arange(width), height)
        position += max(height, width)
    found[:, done:] = position + np.arange(num_tokens - done)
    return found
