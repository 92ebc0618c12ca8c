"""Check models with images and gated delta nets or experts: every gradient of a pack against float64."""

from __future__ import annotations

import pytest
import torch

from tests.models.exact64 import in_float64
from tests.models.mixers.test_delta_gradients import ALLOWED, on_disk, weighted_sum
from tests.models.test_hf_parity import load_model
from tests.models.vision.test_vision_parity import PARTS, TOLERANCE, documents
from tests.tiny_vision_models import make_row, make_vision_model, reference_logits, reference_model

MODELS = 6


def ours(folder) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return mkd's logits of the pack without padding, and name on disk -> whole gradient."""
    from mkd.checkpoint.hf.hf_names import find_map
    from mkd.checkpoint.hf.hf_tower import TOWER, DiskNames

    model = load_model(folder, tp=1)
    model.tower.train_parts(PARTS)
    row = make_row(model.shape.vision, documents(model.shape.vision), multiple=8, total=160)
    hidden = model(row.tokens[None], row.position_ids[None], row.packed(), images=row.images())
    logits = model.logits(hidden)[:, 0, : model.shape.vocab_size]
    real = zip(row.starts, row.documents, strict=True)
    logits = torch.cat([logits[start : start + len(one.ids)] for start, one in real])
    weighted_sum(logits).backward()
    found: dict[str, torch.Tensor] = {}
    names = DiskNames.of_shape(model.shape)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if name.startswith(TOWER):
            found[names.on_disk(name)] = parameter.grad
            continue
        tensor_map = find_map(model.shape, name, 0)
        for piece in tensor_map.pieces(tuple(parameter.shape), 0, 1):
            full = torch.zeros(tensor_map.tensor_shapes()[piece.tensor])
            whole = found.setdefault(names.on_disk(piece.tensor), full)
            piece.in_tensor(whole).copy_(piece.in_shard(parameter.grad))
    return logits.detach(), found


def theirs(model, vision, family: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return transformers' logits, one document at a time, and name on disk -> gradient."""
    logits = torch.cat([reference_logits(model, one) for one in documents(vision)])
    weighted_sum(logits).backward()
    found = {name: one.grad for name, one in model.named_parameters()}
    if family == "qwen3_vl_moe":  # its files have all experts of a layer, [in, out]
        return logits.detach(), {n: one.mT if ".experts." in n else one for n, one in found.items()}
    return logits.detach(), on_disk(found, family)


@pytest.mark.parametrize(
    "family",
    ["qwen3_5_moe", *(pytest.param(one, marks=pytest.mark.slow) for one in ("qwen3_5", "qwen3_vl_moe"))],
)
def test_gradients_are_as_close_to_float64_as_those_of_transformers(family, tmp_path, ranks):
    """Compare root mean squares over some random models, since chance decides in a single one."""
    from mkd.plan.models.model_shape import ModelShape

    squares: dict[str, list[float]] = {}
    for seed in range(MODELS):
        folder = make_vision_model(tmp_path / f"{seed}", family, seed)
        vision = ModelShape.from_hf_dir(folder).vision
        with in_float64(reference_model(folder)) as model:
            _, exact = theirs(model, vision, family)
        expected, single = theirs(reference_model(folder), vision, family)
        ((logits, found),) = ranks.run(ours, 1, folder)
        assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()
        assert found.keys() == exact.keys() == single.keys()
        for name, gradient in exact.items():
            of_name = squares.setdefault(name, [0.0, 0.0])
            for index, one in enumerate((found[name], single[name])):
                of_name[index] += float((one.double() - gradient).norm() / gradient.norm()) ** 2
    ratios = {name: (ours / theirs) ** 0.5 for name, (ours, theirs) in squares.items()}
    assert max(ratios.values()) <= ALLOWED, sorted(ratios.items(), key=lambda one: -one[1])[:5]
