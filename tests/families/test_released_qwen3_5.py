"""Check folders of Qwen3.5 as released: mkd runs their text model, and an export copies the rest."""

from __future__ import annotations

import json
import logging

import pytest
import torch
import transformers

from mkd.checkpoint.hf.hf_carried import find_carried
from mkd.data.corpus.documents import encode_record
from mkd.data.images.conversation import image_reader
from mkd.data.images.processors import has_vision_part
from mkd.data.records.parsing import parse_row
from mkd.errors import CheckpointError, DataError
from mkd.plan.models.model_shape import ModelShape
from mkd.tokenizers.load import load_tokenizer
from tests.checkpoint.hf.test_hf_carried import stored_bytes
from tests.checkpoint.hf.test_hf_experts import round_trip
from tests.models.test_hf_parity import TOLERANCE, documents, packed_logits
from tests.reported import refused
from tests.tiny_released import FURTHER, KINDS, load_tensors, make_released, make_text_alone, released_name
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
    """Weights come back bitwise, stacks as single experts; tower and further layers byte for byte."""
    text = make_text_alone(tmp_path / "text", family, dtype=torch.bfloat16)
    source, back = make_released(tmp_path / "released", text, family), tmp_path / "back"
    ranks.run(round_trip, 2, source, back, *layout)
    before, after = stored_bytes(source), stored_bytes(back)
    carried = {name: one for name, one in before.items() if name.startswith(("mtp.", "model.visual."))}
    assert len(carried) > len(FURTHER) + 20 and carried.items() <= after.items()
    own = {name: one for name, one in after.items() if name not in carried}
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
    """Student and teacher, three steps at TP2: the same bits as the same text models saved alone."""
    text = {
        "student": make_text_alone(tmp_path / "student text", "qwen3_5", seed=1),
        "teacher": make_text_alone(tmp_path / "teacher text", "qwen3_5_moe", seed=2, **WIDER),
    }
    released = {
        name: make_released(tmp_path / name, text[name], family)
        for name, family in (("student", "qwen3_5"), ("teacher", "qwen3_5_moe"))
    }
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
    assert shape == ModelShape.from_hf_dir(text) and shape.vision is None
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
    assert "no layers that predict further tokens" in caplog.text and "no vision tower" in caplog.text


def test_records_with_images_are_refused(tmp_path):
    folder = make_released(tmp_path / "released", make_text_alone(tmp_path / "text", "qwen3_5"), "qwen3_5")
    tokenizer = load_tokenizer("HuggingFaceTokenizer", str(folder))
    images = image_reader(folder, tokenizer, None, 10**6)
    assert images is None and not has_vision_part(folder)
    parts = [{"type": "image"}, {"type": "text", "text": "a fox"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "yes"}]
    record = parse_row(json.dumps({"messages": messages, "images": ["a.png"]}).encode())
    with refused("images-not-read: nothing here can read them", DataError) as caught:
        encode_record(record, tokenizer, True, images)
    assert "a model of qwen3_5 or qwen3_5_moe, whose tower mkd does not run" in caught.value.report()
