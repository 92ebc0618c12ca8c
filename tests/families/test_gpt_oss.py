"""Check GPT-OSS's config.json, as released and as transformers completes it."""

from __future__ import annotations

import pytest

from mkd.families.layer_shape import MoEShape
from mkd.plan.models.model_shape import ModelShape
from tests.reported import refused

RELEASED = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": 12 * ["sliding_attention", "full_attention"],
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def test_the_released_configuration():
    shape = ModelShape.from_hf_config(RELEASED)
    assert [layer.sliding_window for layer in shape.layers] == 12 * [128, None]
    assert shape.moe == MoEShape(32, 4, 2880, biases=True)
    names = ("activation", "mlp_limit", "up_offset", "qkv_bias", "attention_output_bias", "attention_sinks")
    assert [shape.common(name) for name in names] == ["quick_gelu", 7.0, 1.0, True, True, True]
    rope = shape.common("rope")
    assert (rope.kind, rope.factor, rope.truncate, rope.theta) == ("yarn", 32.0, False, 150000.0)
    assert rope.attention_factor == pytest.approx(0.1 * 3.4657359 + 1)


def test_missing_keys_are_those_of_transformers():
    from transformers import GptOssConfig

    sizes = dict(
        num_hidden_layers=3, hidden_size=32, intermediate_size=24, num_attention_heads=64, vocab_size=64
    )
    theirs = GptOssConfig(**sizes).to_dict()
    shape = ModelShape.from_hf_config(dict(sizes, model_type="gpt_oss"))
    assert shape.differences(ModelShape.from_hf_config(theirs)) == []
    assert shape.max_position_embeddings == theirs["max_position_embeddings"]


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("model-feature-not-supported: swiglu_alpha", {"swiglu_alpha": 1.5}),
        ("model-feature-not-supported: hidden_act", {"hidden_act": "gelu"}),
        ("model-feature-not-supported: num_experts_per_tok 1", {"num_experts_per_tok": 1}),
        ("model-config-not-valid: is above the number of experts", {"num_experts_per_tok": 33}),
        ("model-config-not-valid: layers, num_hidden_layers is", {"num_hidden_layers": 23}),
        ("model-config-not-valid: sliding_window is missing or null", {"sliding_window": None}),
        (
            "model-config-not-valid: sliding_window is missing or null",
            {"sliding_window": None, "layer_types": None},
        ),
        ("model-feature-not-supported: rope type", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        ("model-config-not-valid: swiglu_limit is", {"swiglu_limit": 0}),
    ],
)
def test_what_mkd_cannot_run_exactly_is_refused(code, change):
    with refused(code):
        ModelShape.from_hf_config(RELEASED | change)
