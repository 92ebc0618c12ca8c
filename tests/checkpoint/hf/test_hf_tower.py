"""Models with images in and out: names on disk, bitwise round trips, checkpoints at another layout."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mkd.checkpoint.distributed import TrainingState, load_checkpoint, save_checkpoint
from mkd.checkpoint.folders import TrainingPosition
from mkd.checkpoint.hf.hf_assets import HFAssets
from mkd.checkpoint.hf.hf_writer import export_hf
from mkd.checkpoint.saved_tower import tower_problem
from mkd.convert.models import build_model, load_from_hf
from mkd.errors import MkdError
from mkd.parallel.context import ParallelContext
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.parallel_sizes import Sizes
from mkd.platform import detect
from tests.checkpoint.hf.test_hf_writer import import_export
from tests.checkpoint.saved_tensors import all_tensors
from tests.reported import reports
from tests.tiny_vision_models import FAMILIES, make_vision_model, turn_experts

LAYOUTS = {"smolvlm": (2, (1, (3, 1), 1)), "qwen3_vl": (4, (2, (2, 2), 1))}  # the others on one process


LIKE_OTHERS = "idefics3", "qwen3_5"  # smolvlm, and qwen3_5_moe


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=[pytest.mark.slow] if one in LIKE_OTHERS else []) for one in FAMILIES]
)
def test_export_is_bitwise_the_model_that_was_read(family, tmp_path, ranks):
    source = make_vision_model(tmp_path / "source", family, dtype=torch.bfloat16)
    (source / "preprocessor_config.json").write_text('{"size": 1}', encoding="utf-8")
    out, (world_size, layout) = tmp_path / "out", LAYOUTS.get(family, (1, (1, (4,), 1)))
    assert not any(ranks.run(import_export, world_size, source, out, layout, torch.bfloat16))
    original, exported = all_tensors(source), all_tensors(out)
    assert original.keys() == exported.keys()
    for name, tensor in original.items():
        assert exported[name].dtype == torch.bfloat16 and torch.equal(tensor, exported[name]), name
    assert (out / "preprocessor_config.json").read_text(encoding="utf-8") == '{"size": 1}'
    assert json.loads((out / "config.json").read_text(encoding="utf-8"))["dtype"] == "bfloat16"
    _, report = transformers.AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert not report["mismatched_keys"]


def test_experts_are_read_in_either_direction(tmp_path, ranks):
    """An export has them as released, whatever transformers wrote."""
    folders = [make_vision_model(tmp_path / name, "qwen3_vl_moe") for name in ("released", "turned")]
    turn_experts(folders[1])
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    released, turned = (all_tensors(folder) for folder in folders)
    assert torch.equal(released[name], turned[name].mT) and released[name].shape != turned[name].shape
    layout = (1, (4,), 1)
    assert not any(ranks.run(import_export, 1, folders[1], tmp_path / "out", layout, torch.float32))
    exported = all_tensors(tmp_path / "out")
    assert all(torch.equal(tensor, exported[name]) for name, tensor in released.items())


def save_at_tp2(source, folder):
    context = ParallelContext.create(detect(), Sizes(tensor=2))
    model = load_from_hf(source, ModelShape.from_hf_dir(source), torch.float32, context)
    save_checkpoint(folder, TrainingState([model]), TrainingPosition(), context, HFAssets.of(source))


def export_at_pp2(source, folder, out):
    context = ParallelContext.create(detect(), Sizes(pipeline=2))
    shape = ModelShape.from_hf_dir(source)
    model = build_model(shape, torch.float32, context)
    load_checkpoint(next(folder.glob("iter_*")), TrainingState([model]), context)
    pairs = [(model, model.first_layer)]
    export_hf(pairs, shape, out, context=context, assets=HFAssets.of(source))


def test_a_checkpoint_saved_at_tp2_loads_at_pp2(tmp_path, ranks):
    source = make_vision_model(tmp_path / "source", "qwen3_vl")
    ranks.run(save_at_tp2, 2, source, tmp_path / "checkpoint")
    ranks.run(export_at_pp2, 2, source, tmp_path / "checkpoint", tmp_path / "out")
    original, exported = all_tensors(source), all_tensors(tmp_path / "out")
    assert original.keys() == exported.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in original.items())


def load_codes(folder):
    """Return the error codes of loading `folder`."""
    context = ParallelContext.create(detect())
    try:
        load_from_hf(folder, ModelShape.from_hf_dir(folder), torch.float32, context)
    except MkdError as problem:
        return reports(problem)
    return []


def test_a_damaged_tower_is_refused_by_name(tmp_path, ranks):
    source = make_vision_model(tmp_path / "source", "smolvlm")
    index = json.loads((source / "model.safetensors.index.json").read_text(encoding="utf-8"))
    whole = {}
    for file in sorted(set(index["weight_map"].values())):
        whole |= load_file(source / file)
        (source / file).unlink()
    (source / "model.safetensors.index.json").unlink()
    start = "model.vision_model.post_layernorm."
    changed = {name: one for name, one in whole.items() if name != f"{start}weight"}
    changed[f"{start}bias"] = whole[f"{start}bias"][:-1].clone()
    changed["model.connector.further"] = torch.ones(1)
    save_file(changed, source / "model.safetensors", {"format": "pt"})
    (codes,) = ranks.run(load_codes, 1, source)
    assert codes == [
        "hf-tensor-unexpected: is not expected",
        "hf-files-damaged: tensor",
        "hf-tensor-unexpected: has shape",
    ]
    shutil.rmtree(source)


def test_a_trained_tower_needs_a_checkpoint_with_one(tmp_path):
    part = torch.nn.ModuleDict({"tower": torch.nn.Linear(2, 2)})
    assert tower_problem(tmp_path, [part], is_training=False, has_weights=True) is None
    found = tower_problem(tmp_path, [part], is_training=True, has_weights=True)
    assert "--student-train-parts text" in found.do
    part.requires_grad_(False)
    assert tower_problem(tmp_path, [part], is_training=True, has_weights=True) is None
    assert "--reference-hf" in tower_problem(tmp_path, [part], is_training=False, has_weights=False).do
