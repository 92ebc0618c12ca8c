"""Positions of tokens and images equal those of transformers' get_rope_index, without and with padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from mkd.data.images.row_images import rotary_positions

MODELS = {"qwen2_5_vl": Qwen2_5_VLModel, "qwen3_vl": Qwen3VLModel}
DOCUMENTS = [
    (9, []),
    (30, [(3, (1, 4, 8)), (12, (1, 2, 2)), (14, (1, 6, 4))]),
    (20, [(0, (1, 8, 2)), (6, (1, 2, 10))]),
]


@pytest.mark.parametrize("family", MODELS)
def test_positions_are_those_of_transformers(folders, family):
    with torch.device("meta"):
        model = MODELS[family](AutoConfig.from_pretrained(folders[family]))
    longest = max(length for length, _ in DOCUMENTS)
    ids, mask, types = (torch.zeros(len(DOCUMENTS), longest, dtype=torch.int64) for _ in range(3))
    grids = []
    for row, (length, images) in enumerate(DOCUMENTS):
        mask[row, :length] = 1
        for first, grid in images:
            types[row, first : first + grid[1] * grid[2] // 4] = 1
            grids.append(grid)
    # Images that touch are one run of image tokens for transformers: a text token lies between them.
    wanted, _ = model.get_rope_index(
        ids, mm_token_type_ids=types, image_grid_thw=torch.tensor(grids), attention_mask=mask
    )
    for row, (length, images) in enumerate(DOCUMENTS):
        found = rotary_positions(longest, images, merge=2)
        np.testing.assert_array_equal(found[:, :length], wanted[:, row, :length].numpy())
        padding = found[:, length:] - found[:, length - 1 : length].max()
        np.testing.assert_array_equal(padding, np.tile(np.arange(1, longest - length + 1), (3, 1)))
