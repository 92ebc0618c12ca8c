"""Configurations of Hugging Face models that are damaged or made up: a named error, never a crash later."""

from __future__ import annotations

import json

import pytest

from mkd.errors import CheckpointError
from mkd.plan.model_shape import ModelShape

CONFIG = dict(
    model_type="llama", num_hidden_layers=2, hidden_size=48, intermediate_size=96, num_attention_heads=4, vocab_size=300
)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("num_hidden_layers", "2", "num_hidden_layers is '2'"),
        ("num_hidden_layers", True, "num_hidden_layers is True"),
        ("hidden_size", None, "hidden_size is None"),
        ("num_attention_heads", 0, "num_attention_heads is 0"),
        ("num_attention_heads", [4], "num_attention_heads is [4]"),
        ("vocab_size", 3.5, "vocab_size is 3.5"),
        ("vocab_size", -3, "vocab_size is -3"),
        ("head_dim", "x", "head_dim is 'x'"),
        ("max_position_embeddings", "a", "max_position_embeddings is 'a'"),
        ("rope_theta", "x", "has a value of a wrong kind: could not convert string to float"),
        ("rope_scaling", [1], "has a value of a wrong kind: "),
    ],
)
def test_a_value_of_a_wrong_kind_is_named(name, value, text, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, name: value}))
    with pytest.raises(CheckpointError) as caught:
        ModelShape.from_hf_dir(tmp_path)
    assert str(tmp_path / "config.json") in caught.value.what and text in caught.value.what and caught.value.do


def test_null_is_not_given():
    shape = ModelShape.from_hf_config({**CONFIG, "num_key_value_heads": None, "head_dim": None, "sliding_window": None})
    assert (shape.num_query_groups, shape.head_dim) == (4, 12)


def test_code_of_the_configuration_is_not_run(tmp_path):
    """`auto_map` is not even looked at: the configuration is read as JSON."""
    mark = tmp_path / "was run"
    (tmp_path / "remote.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Remote: ...\n")
    auto_map = {"AutoConfig": "remote.Remote", "AutoModelForCausalLM": "remote.Remote"}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "auto_map": auto_map}))
    assert ModelShape.from_hf_dir(tmp_path).num_layers == 2 and not mark.exists()
