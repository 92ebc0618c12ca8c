"""The images of a packed row: dealt to ranks, and placed on the rows that each rank holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mkd.parallel.image_row import deal_images, held_rows, image_row, num_patches
from mkd.parallel.tensor_records import map_tensors
from mkd.parallel.zigzag import RowShard

GRIDS = [(1, 4, 4), (1, 8, 6), (2, 4, 2), (1, 8, 8), (1, 2, 2)]
MERGE = 2


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_deal_is_balanced_to_one_image(ranks):
    owners = deal_images(GRIDS, ranks)
    loads = [sum(num_patches(g) for g, o in zip(GRIDS, owners, strict=True) if o == r) for r in range(ranks)]
    for image, owner in enumerate(owners):  # no rank ends above another by more than its own smallest image
        assert loads[owner] - num_patches(GRIDS[image]) <= min(loads)
    assert deal_images([(1, 2, 2)] * 3, 2) == [0, 1, 0]


@pytest.mark.parametrize("cp, tp", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_every_image_token_gets_its_own_feature_on_exactly_one_rank(cp, tp):
    spans, cursor, places = torch.tensor([0, 48, 96]), 3, []
    lengths = [num_patches(grid) // MERGE**2 for grid in GRIDS]
    for length in lengths:
        places.append(np.arange(cursor, cursor + length))
        cursor += length + 2
    places, ranks = np.concatenate(places), cp * tp
    owners = deal_images(GRIDS, ranks)
    marks = torch.arange(len(places))  # the true feature of each image token
    parts, rows_seen = [], []
    for rank in range(ranks):
        kept = held_rows(RowShard(rank // tp, cp).rows(spans), rank % tp, tp)
        row = image_row(torch.zeros(0, 4), GRIDS, owners, places, MERGE, rank=rank, ranks=ranks, kept=kept)
        assert [g for g, o in zip(GRIDS, owners, strict=True) if o == rank] == list(row.grids)
        own = [m for m, o in zip(marks.split(lengths), owners, strict=True) if o == rank]
        block = torch.full((row.slots,), -1)
        block[: sum(map(len, own))] = torch.cat(own) if own else torch.zeros(0, dtype=torch.int64)
        parts.append(block)
        rows_seen.append((kept, row))
    features, found = torch.cat(parts), {}
    for kept, row in rows_seen:
        found |= dict(zip(kept[row.rows].tolist(), features[row.features].tolist(), strict=True))
    assert found == dict(zip(places.tolist(), marks.tolist(), strict=True))


def test_a_row_without_images_keeps_its_positions():
    positions = torch.arange(12).view(3, 4)
    row = image_row(torch.zeros(0, 4), [], [], np.zeros(0), MERGE, ranks=4, positions=positions)
    assert row.slots == 0 and len(row.rows) == 0 and torch.equal(row.positions, positions)
    kept = torch.arange(2)
    assert len(image_row(torch.zeros(0, 4), [], [], np.zeros(0), MERGE, kept=kept).rows) == 0


def test_bytes_are_scaled_as_the_tower_takes_them():
    pixels = torch.randint(0, 256, (5, 3, 2, 2), dtype=torch.uint8)
    mean, std = torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1), torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1)
    options = dict(scale=1 / 255 / std, shift=-mean / std)
    row = image_row(pixels, [(5, 2, 2)], [0], np.arange(5), 2, **options)
    torch.testing.assert_close(row.normalised(torch.float32), (pixels / 255 - mean) / std)
    moved = map_tensors(row, lambda tensor: tensor.to("meta"))
    assert moved.scale.is_meta and moved.pixels.is_meta and moved.grids == row.grids
