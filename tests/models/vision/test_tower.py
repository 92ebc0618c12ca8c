"""The vision tower of a model part: dtypes, the parts that learn, and passes with and without images."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mkd.models.vision.features import own_features
from mkd.models.vision.tower import VisionTower
from mkd.models.vision.tower_attention import attend_varlen, pass_inputs
from mkd.plan.models.model_shape import ModelShape
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


def looped(query, key, value, borders, key_borders, longest, key_longest):
    """Attend between borders one after the other, as `varlen_attn` does in one call."""
    assert borders.dtype == torch.int32 and longest == key_longest == int(borders.diff().max())
    parts = [one.split(borders.diff().tolist()) for one in (query, key, value)]
    attended = [
        F.scaled_dot_product_attention(*(one.transpose(0, 1) for one in of_image)).transpose(0, 1)
        for of_image in zip(*parts, strict=True)
    ]
    return torch.cat(attended)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_one_call_for_all_images_and_windows_equals_a_loop(family):
    """The kernel gets borders of images in some blocks, and of windows in the others."""
    shape = ModelShape.from_hf_config(vision_config(family).to_dict())
    torch.manual_seed(0)
    tower = VisionTower(shape, torch.float32, torch.device("cpu"))
    tower.train_parts(("tower", "projector"))
    tower.train()
    row = make_row(shape.vision, [make_document(shape.vision, [(6, 8), (2, 4), (10, 4)], seed=0)], 8, 96)
    results, calls = [], []

    def counted(*arguments):
        calls.append(arguments[3].diff().tolist())
        return looped(*arguments)

    for varlen in (None, counted):
        if varlen is not None:
            attend_varlen(tower.visual, varlen, "flash_of_a_test")
        features = tower(row.images().pixels, row.images().grids)
        tower.zero_grad()
        features.square().sum().backward()
        results.append([features.detach(), *(one.grad.clone() for one in tower.parameters())])
    for own, expected in zip(*results[::-1], strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    windows = [16, 16, 8, 8, 8, 16, 16, 8] if family == "qwen2_5_vl" else [48, 8, 40]
    assert sorted(calls[0]) == sorted(windows) and sum(calls[-1]) == 96
    assert len(calls) == 2 * shape.vision.depth, "blocks are recomputed in backward"
    assert [48, 8, 40] in calls


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_a_pass_takes_its_indices_from_the_host(family):
    """transformers computes nothing from grids: on a GPU the host would wait for it."""
    shape = ModelShape.from_hf_config(vision_config(family).to_dict())
    tower = VisionTower(shape, torch.float32, torch.device("cpu"))
    given = pass_inputs(tower.visual, tower.shape, [(1, 6, 8)], torch.device("cpu"))
    expected = tower.visual(torch.ones(48, 96), grid_thw=torch.tensor([[1, 6, 8]])).pooler_output
    given["grid_thw"] = None
    assert torch.equal(tower.visual(torch.ones(48, 96), **given).pooler_output, expected)


@pytest.mark.parametrize("side", [4, 7, 26, 27, 32])
@pytest.mark.parametrize("family", ["smolvlm", "idefics3"])
def test_positions_in_a_tile_are_those_of_transformers(family, side):
    """Sides that are no power of two round to other positions; Idefics3-8B has 26 patches."""
    sizes = dict(image_size=4 * side, patch_size=4, hidden_size=16, num_hidden_layers=1)
    shape = ModelShape.from_hf_config(
        vision_config(family, vision=sizes, scale_factor=1 if side % 2 else 2).to_dict()
    )
    torch.manual_seed(0)
    tower = VisionTower(shape, torch.float32, torch.device("cpu"))
    pixels = torch.randn(2, 3, 4 * side, 4 * side)
    expected = tower.vision_model(pixel_values=pixels).last_hidden_state
    torch.testing.assert_close(tower._tiles(pixels), expected, rtol=0, atol=1e-6)


def test_an_mlp_of_another_width_runs_with_channels_of_zeros(monkeypatch):
    shape = ModelShape.from_hf_config(vision_config("qwen2_5_vl").to_dict())
    block = VisionTower(shape, torch.float64, torch.device("cpu")).visual.blocks[0]
    weights, hidden = list(block.mlp.requires_grad_().parameters()), torch.randn(5, 32, dtype=torch.float64)
    gate, up, down = (getattr(block.mlp, f"{name}_proj") for name in ("gate", "up", "down"))
    theirs = down(block.mlp.act_fn(gate(hidden)) * up(hidden))
    expected = [theirs, *torch.autograd.grad(theirs.square().sum(), weights)]
    widths, product = [], F.linear
    monkeypatch.setattr(
        F, "linear", lambda x, weight, bias: widths.append(weight.shape) or product(x, weight, bias)
    )
    ours = block.mlp(hidden)
    found = [ours, *torch.autograd.grad(ours.square().sum(), weights)]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert widths == [(48, 32), (48, 32), (32, 48)]  # of 42
