"""Models with images against transformers: logits and gradients of packs of documents with images."""

from __future__ import annotations

import pytest
import torch

from tests.models.test_hf_parity import load_model, weighted_sum
from tests.tiny_vision_models import (
    FAMILIES,
    make_document,
    make_row,
    make_vision_model,
    reference_logits,
    reference_model,
)

TOLERANCE = 1e-5  # relative to the largest element
PARTS = ("tower", "projector")
IN_FP32 = [one for one in FAMILIES if "3_5" not in one and "moe" not in one]  # see test_vision_gradients.py
LONG_QWEN = dict(
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=1e4,
        factor=4.0,
        original_max_position_embeddings=16,
        mrope_section=[2, 1, 3],
    )
)


def documents(vision):
    """Return documents with two images, none, one of another size, and one that begins and ends with text."""
    sizes = [[(1, 2), (1, 1)], [], [(2, 2)]] if vision.image_size else [[(6, 8), (4, 4)], [], [(8, 10)]]
    return [make_document(vision, one, seed=number) for number, one in enumerate(sizes)]


def packed_pass(folder, parts):
    """Return the logits of the pack without padding, and Hugging Face name -> gradient."""
    from mkd.checkpoint.hf.hf_names import find_map
    from mkd.checkpoint.hf.hf_tower import TOWER, DiskNames

    model = load_model(folder, tp=1)
    model.tower.train_parts(parts)
    row = make_row(model.shape.vision, documents(model.shape.vision), multiple=8, total=160)
    hidden = model(row.tokens[None], row.position_ids[None], row.packed(), images=row.images())
    logits = model.logits(hidden)[:, 0, : model.shape.vocab_size]
    real = zip(row.starts, row.documents, strict=True)
    logits = torch.cat([logits[start : start + len(one.ids)] for start, one in real])
    weighted_sum(logits).backward()
    found, names = {}, DiskNames.of_shape(model.shape)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if name.startswith(TOWER):
            found[names.on_disk(name)] = parameter.grad.clone()
            continue
        for piece in find_map(model.shape, name, 0).pieces(tuple(parameter.shape), 0, 1):
            whole = found.setdefault(names.on_disk(piece.tensor), [])
            whole.append((piece, piece.in_shard(parameter.grad).clone()))
    return logits.detach().clone(), found


@pytest.mark.parametrize(
    "family, text", [*((family, {}) for family in IN_FP32), ("qwen2_5_vl", LONG_QWEN)], ids=[*IN_FP32, "yarn"]
)
def test_logits_and_gradients_equal_transformers(family, text, tmp_path, ranks):
    folder = make_vision_model(tmp_path / family, family, text=text)
    ((logits, found),) = ranks.run(packed_pass, 1, folder, PARTS)
    model = reference_model(folder)
    from mkd.plan.models.model_shape import ModelShape

    vision = ModelShape.from_hf_dir(folder).vision
    expected = torch.cat([reference_logits(model, one) for one in documents(vision)])
    assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()
    weighted_sum(expected).backward()
    gradients = disk_gradients(model, folder, tmp_path)
    assert found.keys() == gradients.keys()
    for name, gradient in found.items():
        pairs = [(gradient, gradients[name])]
        if isinstance(gradient, list):
            pairs = [(own, piece.in_tensor(gradients[name])) for piece, own in gradient]
        # A softmax does not see the bias of keys: its gradient is rounding alone.
        scale = gradients[name.replace("k_proj.bias", "q_proj.bias")].abs().max()
        assert scale > 0, f"{name} has no gradient, so that the comparison shows nothing"
        for own, theirs in pairs:
            error = (own - theirs).abs().max()
            assert error <= TOLERANCE * scale, f"{name}: relative error {error / scale:.2e}"


def disk_gradients(model, folder, tmp_path):
    """Return name on disk -> gradient: the names are those that transformers writes."""
    from safetensors import safe_open

    for parameter in model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(tmp_path / "gradients", max_shard_size="10GB")
    with safe_open(tmp_path / "gradients" / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_a_frozen_tower_takes_no_gradient(tmp_path, ranks):
    folder = make_vision_model(tmp_path / "m", "qwen3_vl")
    ((_, frozen),) = ranks.run(packed_pass, 1, folder, ())
    ((_, projector),) = ranks.run(packed_pass, 1, folder, ("projector",))
    own = {name for name in projector if name.startswith("model.visual.")}
    assert not any(name.startswith("model.visual.") for name in frozen)
    assert own and all("merger" in name for name in own)


def pass_of_rows(folder):
    """Return whether a pass asked for the rows of each document, as Megatron's rotary embedding does."""
    from unittest.mock import patch

    model = load_model(folder, tp=1)
    row = make_row(model.shape.vision, documents(model.shape.vision), multiple=8, total=160)
    asked = "megatron.core.models.common.embeddings.rope_utils._apply_rotary_pos_emb_thd"
    with torch.no_grad(), patch(asked, side_effect=AssertionError("rows were looked up")) as lookup:
        for images in (row.images(), None):
            model(row.tokens[None], row.position_ids[None], row.packed(), images=images)
    return lookup.called


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_no_layer_looks_up_the_rows_of_documents(family, tmp_path, ranks):
    """On a GPU each layer would wait for the borders of every document."""
    assert ranks.run(pass_of_rows, 1, make_vision_model(tmp_path / family, family)) == [False]
