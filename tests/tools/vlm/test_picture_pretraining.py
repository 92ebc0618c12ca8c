"""Test pretraining on named pictures."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from tests.tools.vlm.small_pictures import make_tiny, write_pictures
from tools.vlm.emoji_pictures import STYLES, read_pixels
from tools.vlm.picture_pretraining import IGNORED, caption_logits, image_tokens, name_tokens, pretrain
from tools.vlm.small_vlm import load_vlm


def test_pretraining_learns_names(tmp_path):
    named = write_pictures(tmp_path / "pictures")
    tiny, pixels = make_tiny(tmp_path), read_pixels(tmp_path / "pictures", STYLES[0], named)
    before = load_vlm(tiny)
    matched, written = pretrain(tiny, pixels, named, 32 * 60, 32 * 150, seed=1, batch_size=32, lr=3e-3)
    after, labels = load_vlm(tiny), name_tokens(tiny, named)
    assert matched < 0.6 * math.log(len(named))

    def loss(model, shown) -> float:
        with torch.no_grad():
            logits = caption_logits(model, shown, labels.clamp(min=0))
        return float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED))

    assert loss(after, pixels) < 0.5 * loss(before, pixels)
    assert loss(after, pixels) < loss(after, pixels.roll(3, 0))


def test_matching_alone_leaves_the_text_model_and_scales_image_tokens(tmp_path):
    named = write_pictures(tmp_path / "pictures")
    tiny, pixels = make_tiny(tmp_path), read_pixels(tmp_path / "pictures", STYLES[0], named)
    before = load_vlm(tiny).state_dict()
    _, written = pretrain(tiny, pixels, named, 64 * 3, 0, seed=1)
    after = load_vlm(tiny)
    state = after.state_dict()
    assert math.isnan(written)
    assert all(torch.equal(state[name], before[name]) for name in before if "text_model" in name)
    size = image_tokens(after.model, pixels).pow(2).mean().sqrt()
    assert float(size) == pytest.approx(
        float(after.get_input_embeddings().weight.pow(2).mean().sqrt()), rel=0.2
    )
