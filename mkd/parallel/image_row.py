"""The images of one packed row in the form that a model's first stage takes, and how they are dealt to ranks.

The ranks that share a row (tensor times context parallelism) share its images: each runs the vision tower on
its own images, and all of them gather the features. Data and models import this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Grid = tuple[int, int, int]
"""Frames or tiles of an image, rows of patches, columns of patches."""


@dataclass(frozen=True)
class ImageRow:
    """The images of one row of t packed tokens, as one rank takes them.

    The row may have no image: then `slots` is 0, and only `positions` is read. Features are numbered rank by
    rank, with room for `slots` of each; `rows` and `features` say where each goes.
    """

    pixels: Tensor
    """This rank's images, uint8 or floating.

    Patches [sum of t * h * w, channels * frames * side * side] for Qwen, tiles [sum of t, 3, side, side] for
    SmolVLM; in the order of `grids`. A rank without images has 0 rows of the right width.
    """
    grids: tuple[Grid, ...]  # of this rank's images
    slots: int  # features of the rank that has most; equal on all ranks of the row
    rows: Tensor  # [n] int64, distinct places in this rank's part of the row that hold image tokens
    features: Tensor  # [n] int64 below ranks * slots, the feature that each of them takes
    positions: Tensor | None = None
    """Rotary positions (time, height, width) of the WHOLE row, int64 [3, t], padding included.

    The same on every stage and context-parallel rank. None for a model that counts tokens.
    """
    scale: Tensor | None = None  # fp32, broadcasts over one patch or tile; None: pixels are normalised
    shift: Tensor | None = None  # fp32 like `scale`: the tower sees pixels * scale + shift

    def normalised(self, dtype: torch.dtype) -> Tensor:
        """Return the pixels as the tower takes them; scaled in fp32, then rounded to `dtype`."""
        if self.scale is None or self.shift is None:
            return self.pixels.to(dtype)
        return torch.addcmul(self.shift, self.pixels.float(), self.scale).to(dtype)


def num_patches(grid: Grid) -> int:
    """Return the patches of an image: the cost of its tower pass, and its share of a packing capacity."""
    return grid[0] * grid[1] * grid[2]


def deal_images(grids: Sequence[Grid], ranks: int) -> list[int]:
    """Return the rank that runs the tower on each image, a pure function.

    The image with most patches goes first to the rank with fewest; ties go to the earlier image and the lower
    rank. Deal the images of each pack by itself, so that the owner does not depend on the micro-batch.
    """
    owners, loads = [0] * len(grids), [0] * ranks
    for image in sorted(range(len(grids)), key=lambda one: -num_patches(grids[one])):
        owners[image] = loads.index(min(loads))
        loads[owners[image]] += num_patches(grids[image])
    return owners


def image_row(
    pixels: Tensor,  # of the images that `rank` owns, in row order
    grids: Sequence[Grid],  # of all images of the row, in row order
    owners: Sequence[int],  # of all images; `deal_images` pack by pack
    places: np.ndarray,  # [n] int64, ascending rows of the whole row with image tokens
    merge: int,  # patches side by side that make one feature: merge * merge patches are a feature
    *,
    rank: int = 0,  # in the group of ranks that share the row: context rank * tp + tensor rank
    ranks: int = 1,
    kept: Tensor | None = None,  # [t'] int64, rows of the whole row that the rank holds; None: all
    positions: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> ImageRow:
    """Describe the images of a row for one rank.

    `kept` is `held_rows`: with sequence parallelism a tensor-parallel rank holds its share of them alone.
    """
    lengths = [num_patches(grid) // merge**2 for grid in grids]
    assert sum(lengths) == len(places), f"{sum(lengths)} features, {len(places)} image tokens"
    loads = [sum(n for n, owner in zip(lengths, owners, strict=True) if owner == r) for r in range(ranks)]
    slots, filled, runs = max(loads, default=0), [0] * ranks, [np.zeros(0, dtype=np.int64)]
    for length, owner in zip(lengths, owners, strict=True):
        start = owner * slots + filled[owner]
        runs.append(np.arange(start, start + length))
        filled[owner] += length
    rows = torch.from_numpy(np.asarray(places, dtype=np.int64))
    features = torch.from_numpy(np.concatenate(runs))
    if kept is not None:
        here = torch.searchsorted(rows, kept).clamp(max=max(len(rows) - 1, 0))
        own = (rows[here] == kept).nonzero().flatten() if len(rows) else here[:0]
        rows, features = own, features[here[own]]
    mine = tuple(grid for grid, owner in zip(grids, owners, strict=True) if owner == rank)
    return ImageRow(pixels, mine, slots, rows, features, positions, scale, shift)


def held_rows(rows: Tensor, tp_rank: int, tp_size: int) -> Tensor:
    """Return the share of `rows` [t] that a tensor-parallel rank holds with sequence parallelism, [t / tp].

    `rows` are those of the process's `RowShard`, in order.
    """
    return rows.view(tp_size, -1)[tp_rank]
