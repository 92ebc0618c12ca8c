"""Which versions of transformers let a tower attend to all images in one call."""

from __future__ import annotations

import sys

import pytest
import torch

from mkd.models.vision.tower import VisionTower
from mkd.models.vision.tower_attention import NAME, attend_varlen
from mkd.plan.models.model_shape import ModelShape
from tests.models.vision.test_tower import looped, vision_config

ASKS = "is_flash_attention_requested"


def compared_by_name(config=None, requested_attention_implementation=None):
    """Do as versions that take one name alone."""
    return requested_attention_implementation == "flash_attention_2"


@pytest.mark.parametrize("found", ["now", "absent", compared_by_name])
def test_a_version_that_hands_over_no_borders_keeps_its_loop(found, monkeypatch):
    shape = ModelShape.from_hf_config(vision_config("qwen2_5_vl").to_dict())
    visual = VisionTower(shape, torch.float32, torch.device("cpu")).visual
    model, before = sys.modules[type(visual).__module__], visual.config._attn_implementation
    if found == "absent":
        monkeypatch.delattr(model, ASKS)
    elif found != "now":
        monkeypatch.setattr(model, ASKS, found)
    attend_varlen(visual, looped)
    assert visual.config._attn_implementation == (NAME if found == "now" else before)
    assert before != NAME
