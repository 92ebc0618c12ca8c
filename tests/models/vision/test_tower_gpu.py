"""The towers on a GPU: attention in one call against transformers' loop, and passes that never wait."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from mkd.models.vision.features import own_features
from mkd.models.vision.tower import VisionTower
from mkd.models.vision.tower_attention import NAME
from mkd.parallel.tensor_records import map_tensors
from mkd.plan.models.model_shape import ModelShape
from tests.tiny_vision_models import make_document, make_row, vision_config

GRIDS = [(18, 24), (6, 4), (10, 30)]
SIZES = {  # heads of 80 and 72 channels, as in the real towers
    "qwen2_5_vl": dict(hidden_size=160, intermediate_size=200, window_size=32),
    "qwen3_vl": dict(hidden_size=144, intermediate_size=200),
    "qwen3_5": dict(hidden_size=144, intermediate_size=200),
    "smolvlm": dict(hidden_size=144, intermediate_size=200),
}


def build(family, dtype, device):
    """Return a trained tower and a row of images of several sizes for it."""
    shape = ModelShape.from_hf_config(vision_config(family, vision=SIZES[family]).to_dict())
    torch.manual_seed(0)
    tower = VisionTower(shape, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))  # the same values in both dtypes
    weights = tower.state_dict()
    tower = VisionTower(shape, dtype, device)
    tower.load_state_dict(weights)
    tower.train_parts(("tower", "projector"))
    sizes = GRIDS if not shape.vision.image_size else [(1, 2), (1, 1)]
    row = make_row(shape.vision, [make_document(shape.vision, sizes, seed=0)], 8, 256)
    return tower.train(), map_tensors(row.images(), lambda one: one.to(device)), shape.hidden_size


def results(family, dtype, device, implementation=None):
    """Return the features and every gradient, in fp32."""
    tower, images, width = build(family, dtype, device)
    if implementation is not None:
        tower.visual.config._attn_implementation = implementation
    features = own_features(tower, images, width, dtype)
    weights = torch.linspace(-1, 1, features.numel(), device=device).view_as(features)
    (features.float() * weights).sum().backward()
    return [features.detach().float(), *(one.grad.float() for one in tower.parameters())]


def errors(found, exact):
    """Return relative L2 errors of the features, and of all gradients together."""
    parts = [(found[0], exact[0]), tuple(torch.cat([x.flatten() for x in one[1:]]) for one in (found, exact))]
    return [float((own - other).norm() / other.norm()) for own, other in parts]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_varlen_attention_equals_the_loop(family):
    """In bf16 both are as far from fp32: features, and the gradients of the whole tower."""
    device = torch.device("cuda")
    assert build(family, torch.bfloat16, device)[0].visual.config._attn_implementation == NAME
    exact = results(family, torch.float32, device)
    varlen = errors(results(family, torch.bfloat16, device), exact)
    loop = errors(results(family, torch.bfloat16, device, "sdpa"), exact)
    for own, other in zip(varlen, loop, strict=True):
        assert own <= 1.3 * other < 0.1, (varlen, loop)


@contextmanager
def no_waiting(device):
    """Raise an error for anything that makes the host wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def pass_without_waiting(family, dtype, device):
    tower, images, width = build(family, dtype, device)
    own_features(tower, images, width, dtype).sum().backward()  # kernels are loaded, memory is pinned
    with no_waiting(device):
        own_features(tower, images, width, dtype).sum().backward()
        with torch.no_grad():
            own_features(tower, images, width, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("family", SIZES)
def test_the_host_does_not_wait_for_a_pass(family):
    pass_without_waiting(family, torch.bfloat16, torch.device("cuda"))
