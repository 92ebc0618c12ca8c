"""Check folders of Gemma 4 as released: mkd runs their text model, and an export copies the towers."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

from mkd.data.images.conversation import image_reader
from mkd.data.images.processors import has_vision_part
from mkd.errors import CheckpointError, UsageError
from mkd.plan.models.model_shape import ModelShape
from mkd.tokenizers.load import load_tokenizer
from tests.checkpoint.hf.test_hf_carried import stored_bytes
from tests.checkpoint.hf.test_hf_experts import round_trip
from tests.models.test_hf_parity import TOLERANCE, documents, packed_logits
from tests.reported import refused
from tests.tiny_models import add_tokenizer, make_model
from tests.tiny_released import load_tensors, released_name

TOWER = dict(num_hidden_layers=2, hidden_size=16, num_attention_heads=2, num_key_value_heads=2, head_dim=8)
TOWER |= dict(intermediate_size=24, patch_size=4, position_embedding_size=64)


def make_released(folder, text):
    """Save the model in the folder `text` as released: nested, a tower beside it."""
    own = json.loads((text / "config.json").read_text())
    torch.manual_seed(9)
    config = transformers.Gemma4Config(text_config=own, vision_config=TOWER)
    model = transformers.Gemma4ForConditionalGeneration(config)
    texts = {released_name(name): one for name, one in load_tensors(text).items()}
    dtype = texts["model.language_model.norm.weight"].dtype
    tower = {name: one for name, one in model.state_dict().items() if not released_is_text(name)}
    assert all(name.startswith(("model.vision_tower.", "model.embed_vision.")) for name in tower)
    tensors = {name: one.to(dtype) for name, one in tower.items()} | texts
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text()) | {"dtype": own["dtype"]}
    content["architectures"] = ["Gemma4ForConditionalGeneration"]
    (folder / "config.json").write_text(json.dumps(content))
    return add_tokenizer(folder)


def released_is_text(name):
    return name.startswith(("model.language_model.", "lm_head."))


@torch.no_grad()
def released_logits(folder):
    """Return the logits of transformers' released class, one document at a time."""
    model, found = transformers.Gemma4ForConditionalGeneration.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not any(found[key] for key in ("missing_keys", "mismatched_keys", "unexpected_keys"))
    return torch.cat([model.eval()(input_ids=ids[None]).logits[0] for ids in documents(307)])


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    folder = tmp_path_factory.mktemp("released")
    make = dict(shard_size="1GB", dtype=torch.bfloat16, use_bidirectional_attention="vision", pad_token_id=0)
    text = make_model(folder / "text", "gemma4-experts", **make)
    return text, make_released(folder / "whole", text)


def test_an_export_is_the_released_model_again(released, tmp_path, ranks):
    """Logits are those of the released class. Weights come back bitwise, towers byte for byte."""
    text, folder = released
    expected = released_logits(folder)
    logits = torch.cat(ranks.run(packed_logits, 2, folder, 2, True), dim=1)[:, : expected.shape[1]]
    assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()
    back = tmp_path / "back"
    ranks.run(round_trip, 2, folder, back, 2, 1, 2)
    assert stored_bytes(back) == stored_bytes(folder)
    config, given = (json.loads((one / "config.json").read_text()) for one in (back, folder))
    assert config == given
    assert torch.equal(released_logits(back), expected)


def test_the_text_model_is_what_text_config_says(released):
    text, folder = released
    assert ModelShape.from_hf_dir(folder) == ModelShape.from_hf_dir(text)
    config = json.loads((folder / "config.json").read_text())
    silent = {name: value for name, value in config.items() if name != "tie_word_embeddings"}
    assert ModelShape.from_hf_config(silent).tie_word_embeddings  # as in transformers
    with refused("model-config-not-valid: text_config is missing", CheckpointError):
        ModelShape.from_hf_config(config | {"text_config": None})


def test_images_are_refused(released):
    tokenizer = load_tokenizer("HuggingFaceTokenizer", str(released[1]))
    assert image_reader(released[1], tokenizer, None, 10**6) is None and not has_vision_part(released[1])
    with refused("remove-flag: of gemma4 mkd runs the text model alone", UsageError):
        image_reader(released[1], tokenizer, "somewhere", 10**6)
