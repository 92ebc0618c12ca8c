"""Check folders of Qwen3.5 as released, trained on text: the tower changes nothing, and an export has it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch
import transformers

from mkd.checkpoint.hf.hf_carried import find_carried
from mkd.errors import CheckpointError
from mkd.plan.models.model_shape import ModelShape
from tests.checkpoint.hf.test_hf_carried import stored_bytes
from tests.checkpoint.hf.test_hf_experts import round_trip
from tests.models.test_hf_parity import TOLERANCE, documents, packed_logits
from tests.reported import refused
from tests.tiny_released import (
    FURTHER,
    KINDS,
    ROPE,
    load_tensors,
    make_released,
    make_text_alone,
    released_name,
)
from tests.train.invariance import Layout, add_text, run_layout

WIDER = dict(hidden_size=64, vocab_size=330)


def load_theirs(folder):
    """Return transformers' model of the released class, and what it did not find or use."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(folder, output_loading_info=True)


@torch.no_grad()
def released_logits(folder):
    """Return the logits of transformers' released class, one document at a time."""
    model = load_theirs(folder)[0].float().eval()
    return torch.cat([model(input_ids=ids[None]).logits[0] for ids in documents(307)])


@pytest.mark.parametrize("family", KINDS)
def test_logits_equal_those_of_the_released_class(family, tmp_path, ranks):
    text = make_text_alone(tmp_path / "text", family)
    folder = make_released(tmp_path / "released", text, family)
    expected = released_logits(folder)
    logits = torch.cat(ranks.run(packed_logits, 2, folder, 2, True), dim=1)[:, : expected.shape[1]]
    assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize(("family", "layout"), [("qwen3_5", (1, 2, 1)), ("qwen3_5_moe", (2, 1, 2))])
def test_an_export_is_the_released_model_again(family, layout, tmp_path, ranks):
    """Weights come back bitwise, the tower too, stacks as single experts; further layers byte for byte."""
    text = make_text_alone(tmp_path / "text", family, dtype=torch.bfloat16)
    source, back = make_released(tmp_path / "released", text, family), tmp_path / "back"
    ranks.run(round_trip, 2, source, back, *layout)
    before, after = stored_bytes(source), stored_bytes(back)
    others = {name: one for name, one in before.items() if name.startswith(("mtp.", "model.visual."))}
    assert len(others) > len(FURTHER) + 20 and others.items() <= after.items()
    own = {name: one for name, one in after.items() if name not in others}
    assert own == {released_name(name): one for name, one in stored_bytes(text).items()}
    config, given = (json.loads((folder / "config.json").read_text()) for folder in (back, source))
    assert config == given and config["text_config"]["mtp_num_hidden_layers"] == 1
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "tokenizer.json"):
        assert (back / name).read_bytes() == (source / name).read_bytes()
    (theirs, found), (first, _) = load_theirs(back), load_theirs(source)
    assert not any(found[key] for key in ("missing_keys", "mismatched_keys", "unexpected_keys"))
    assert type(theirs).__name__ == given["architectures"][0]
    state = theirs.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in first.state_dict().items())


def test_training_equals_that_of_the_text_models_alone(tmp_path, ranks):
    """Student and teacher, three steps of text at TP2: the bits of the same text models saved alone."""
    text = {
        "student": make_text_alone(tmp_path / "student text", "qwen3_5", seed=1),
        "teacher": make_text_alone(tmp_path / "teacher text", "qwen3_5_moe", seed=2, **WIDER),
    }
    released = {
        name: make_released(tmp_path / name, text[name], family)
        for name, family in (("student", "qwen3_5"), ("teacher", "qwen3_5_moe"))
    }
    for folder in released.values():  # the tokenizer knows no images
        (folder / "preprocessor_config.json").unlink()
    results, weights = [], []
    for number, pair in enumerate((text, released)):
        add_text(pair["student"])
        layout = Layout("TP2", 2, tp=2, flags=("--sequence-parallel",))
        out = tmp_path / f"out {number}"
        results.append(ranks.run(run_layout, 2, layout, pair["student"], pair["teacher"], out, 3))
        weights.append(load_tensors(out / "updated"))
    assert results[0] == results[1]
    alone, behind = weights
    assert behind.keys() >= {released_name(name) for name in alone}
    assert all(torch.equal(tensor, behind[released_name(name)]) for name, tensor in alone.items())
    before = load_tensors(text["student"])
    assert not any(torch.equal(tensor, before[name]) for name, tensor in alone.items())


def test_the_text_model_is_what_text_config_says(tmp_path):
    text = make_text_alone(tmp_path / "text", "qwen3_5")
    folder = make_released(tmp_path / "released", text, "qwen3_5")
    shape = ModelShape.from_hf_dir(folder)
    (section,) = {layer.rope.sections for layer in shape.layers}
    alone = [
        replace(one, rope=replace(one.rope, sections=(), interleaved_sections=False)) for one in shape.layers
    ]
    assert replace(shape, vision=None, layers=tuple(alone)) == ModelShape.from_hf_dir(text)
    assert section == tuple(ROPE["mrope_section"]) and shape.vision.deepstack == 0
    config = json.loads((folder / "config.json").read_text())
    with refused("model-config-not-valid: text_config is missing", CheckpointError):
        ModelShape.from_hf_config(config | {"text_config": None})
    with refused("model-config-not-valid: num_hidden_layers is 0", CheckpointError):
        ModelShape.from_hf_config(config | {"text_config": config["text_config"] | {"num_hidden_layers": 0}})


def test_what_an_export_lacks_is_said(tmp_path, caplog):
    folder = make_released(tmp_path / "released", make_text_alone(tmp_path / "text", "qwen3_5"), "qwen3_5")
    shape = ModelShape.from_hf_dir(folder)
    (folder / "model.safetensors").unlink()
    with caplog.at_level(logging.WARNING, "mkd"):
        assert find_carried(shape, folder) == {}
    assert "no layers that predict further tokens" in caplog.text and "no vision tower" not in caplog.text
