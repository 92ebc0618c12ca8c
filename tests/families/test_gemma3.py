"""Check Gemma 3's config.json, in its newer and older spelling, against transformers."""

from __future__ import annotations

import copy
import json

import pytest

from mkd.errors import CheckpointError, UsageError
from mkd.plan.models.model_shape import ModelShape
from tests.reported import refused

SIZES = dict(
    model_type="gemma3_text",
    num_hidden_layers=14,
    hidden_size=48,
    intermediate_size=96,
    num_attention_heads=4,
    vocab_size=300,
)
OLDER = dict(rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling={"rope_type": "linear", "factor": 4.0})
NEWER = dict(
    rope_parameters={
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
    }
)


@pytest.mark.parametrize(
    "more",
    [
        {},
        OLDER,
        NEWER,
        {"sliding_window_pattern": 3, "sliding_window": 7, "query_pre_attn_scalar": 168},
        {"layer_types": 7 * ["full_attention", "sliding_attention"], "tie_word_embeddings": False},
        {"layer_types": 14 * ["full_attention"]},
    ],
)
def test_layers_are_those_of_transformers(more):
    from transformers import AutoConfig

    theirs, ours = (
        AutoConfig.for_model(**copy.deepcopy(SIZES | more)),
        ModelShape.from_hf_config(SIZES | more),
    )
    assert ours.family == "gemma3_text" and ours.num_layers == 14
    for kind, layer in zip(theirs.layer_types, ours.layers, strict=True):
        assert layer.sliding_window == (theirs.sliding_window if kind == "sliding_attention" else None)
        rope = theirs.rope_parameters[kind]
        assert (layer.rope.kind, layer.rope.theta) == (rope["rope_type"], rope["rope_theta"])
        assert layer.rope.factor == rope.get("factor", 1.0) and layer.rope.rotary_dim == theirs.head_dim
        assert layer.qk_norm and layer.post_norms and layer.activation == "gelu_tanh"
    assert (ours.head_dim, ours.num_query_groups) == (theirs.head_dim, theirs.num_key_value_heads)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.attention_scale == theirs.query_pre_attn_scalar**-0.5
    assert ours.embedding_scale == theirs.hidden_size**0.5 and ours.zero_centered_norms
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.norm_epsilon == theirs.rms_norm_eps
    written = ModelShape.from_hf_config(json.loads(theirs.to_json_string()))
    assert ours.differences(written) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("use_bidirectional_attention", True),
        ("attention_bias", True),
        ("hidden_activation", "gelu"),
        ("layer_types", 14 * ["chunked_attention"]),
    ],
)
def test_what_mkd_cannot_run_exactly_is_refused(name, value):
    with pytest.raises(UsageError) as caught:
        ModelShape.from_hf_config(SIZES | {name: value})
    assert name in caught.value.what or name == "layer_types"


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_other_ropes_are_refused(kind):
    rope = {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 64}
    with refused("model-feature-not-supported: rope type"):
        ModelShape.from_hf_config(SIZES | {"rope_parameters": {"full_attention": rope}})


@pytest.mark.parametrize(
    "wrong", ["x", 0, -1, [1], {"factor": "8"}, {"rope_theta": -1.0}, {"rope_type": "linear"}]
)
def test_a_rope_of_a_wrong_kind_is_named(wrong):
    with pytest.raises((CheckpointError, UsageError)):
        ModelShape.from_hf_config(SIZES | {"rope_parameters": {"full_attention": wrong}})


def test_a_multimodal_model_is_refused_with_the_way_out():
    with pytest.raises(UsageError) as caught:
        ModelShape.from_hf_config({"model_type": "gemma3", "text_config": SIZES})
    assert "text model" in caught.value.do


def test_differences_name_the_layer():
    ours = ModelShape.from_hf_config(SIZES)
    theirs = ModelShape.from_hf_config(SIZES | OLDER | {"query_pre_attn_scalar": 64})
    assert ours.differences(theirs) == [
        "attention_scale 0.0625 instead of 0.125",
        "layer 0: rope.theta 10000.0 instead of 20000.0",
        "layer 5: rope.kind default instead of linear",
        "layer 5: rope.factor 1.0 instead of 4.0",
    ]
