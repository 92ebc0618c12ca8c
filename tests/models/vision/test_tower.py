"""The vision tower of a model part: dtypes, the parts that learn, and passes with and without images."""

from __future__ import annotations

import pytest
import torch

from mkd.models.vision.features import own_features
from mkd.models.vision.tower import VisionTower
from mkd.plan.model_shape import ModelShape
from tests.tiny_vision_models import make_document, make_row, vision_config

SHAPE = ModelShape.from_hf_config(vision_config("qwen3_vl").to_dict())
WIDTH = SHAPE.hidden_size


def build(dtype=torch.float32, parts=("tower", "projector")):
    torch.manual_seed(0)
    tower = VisionTower(SHAPE, dtype, torch.device("cpu"))
    tower.train_parts(parts)
    return tower.train()


def images(sizes):
    return make_row(SHAPE.vision, [make_document(SHAPE.vision, sizes, seed=0)], 8, 64).images()


def test_angles_stay_fp32_in_bf16():
    tower = build(torch.bfloat16)
    assert {one.dtype for one in tower.parameters()} == {torch.bfloat16}
    assert {one.dtype for one in tower.buffers()} == {torch.float32}
    features = own_features(tower, images([(6, 8)]), WIDTH, torch.bfloat16)
    assert features.dtype == torch.bfloat16 and features.shape == (12, 3, WIDTH)
    exact = own_features(build(), images([(6, 8)]), WIDTH, torch.float32)
    assert (features - exact).abs().max() <= 0.05 * exact.abs().max()


def test_a_frozen_tower_stays_in_evaluation():
    tower = build(parts=())
    assert not tower.training and not tower.trained
    assert not own_features(tower, images([(4, 4)]), WIDTH, torch.float32).requires_grad
    assert build(parts=("projector",)).training


@pytest.mark.parametrize("sizes", [[(6, 8), (2, 4)], []])
def test_all_gradients_arrive_in_the_order_of_the_buckets(sizes):
    """DDP fills its buckets from the last parameter on, in the same order with and without images."""
    tower, arrived = build(), []
    names = {parameter: name for name, parameter in tower.named_parameters()}
    for parameter in tower.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: arrived.append(names[one]))
    given = images(sizes)
    features = own_features(tower, given, WIDTH, torch.float32)
    (features.square().sum() if sizes else features.sum()).backward()
    assert arrived == list(names.values())[::-1]
    if not sizes:
        assert all(not one.grad.any() for one in tower.parameters())
        return
    found = [one.grad.clone() for one in tower.parameters()]
    tower.zero_grad()
    tower(given.pixels, given.grids).square().sum().backward()
    for one, expected in zip(found, tower.parameters(), strict=True):
        torch.testing.assert_close(one, expected.grad, rtol=1e-5, atol=1e-7)
