"""Check DeepSeek-V3's config.json, as released and as transformers writes it."""

from __future__ import annotations

import pytest

from mkd.families.layer_shape import MLAShape
from mkd.plan.models.model_shape import ModelShape
from tests.reported import refused
from tests.tiny_models import config_of

RELEASED = {  # with fewer layers, all of them dense
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "max_position_embeddings": 163840,
    "vocab_size": 129280,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def test_the_released_configuration():
    shape = ModelShape.from_hf_config(RELEASED)
    mla = shape.common("mla")
    assert mla == MLAShape(512, 128, 64, 128, q_lora_rank=1536) and mla.qk_head_dim == shape.head_dim == 192
    rope = shape.common("rope")
    assert (rope.kind, rope.rotary_dim, rope.factor, rope.attention_factor) == ("yarn", 64, 40.0, 1.0)
    assert shape.attention_scale == pytest.approx((0.1 * 3.6888794541139363 + 1) ** 2 / 192**0.5)
    assert (shape.num_query_groups, shape.value_dim) == (128, 128)


@pytest.mark.parametrize("family", ["deepseek", "moonlight"])
def test_scale_and_frequencies_are_those_of_transformers(family, tmp_path):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    config = config_of(family)
    shape, theirs = ModelShape.from_hf_config(config), DeepseekV3Config(**config)
    attention = DeepseekV3Attention(theirs, 0)
    assert (shape.attention_scale or shape.head_dim**-0.5) == pytest.approx(attention.scaling, rel=1e-12)
    assert shape.common("mla").norm_epsilon == attention.kv_a_layernorm.variance_epsilon


@pytest.mark.parametrize(
    ("code", "change"),
    [
        (
            "model-feature-not-supported: norm_topk_prob",
            {"first_k_dense_replace": 2, "norm_topk_prob": False},
        ),
        (
            "model-feature-not-supported: 12 experts in",
            {"first_k_dense_replace": 2, "num_experts_per_tok": 12},
        ),
        (
            "model-feature-not-supported: scoring_func",
            {"first_k_dense_replace": 2, "scoring_func": "softmax"},
        ),
        ("model-feature-not-supported: topk_method", {"first_k_dense_replace": 2, "topk_method": "greedy"}),
        ("model-feature-not-supported: moe_layer_freq", {"first_k_dense_replace": 2, "moe_layer_freq": 2}),
        ("model-config-not-valid: scoring_func is", {"scoring_func": 1}),
        ("model-config-not-valid: do not fit", {"first_k_dense_replace": 2, "n_group": 7}),
        ("model-config-not-valid: do not fit", {"first_k_dense_replace": 2, "topk_group": 9}),
        ("model-config-not-valid: do not fit", {"first_k_dense_replace": 2, "n_group": 128, "topk_group": 2}),
        (
            "model-config-not-valid: is above the number of experts",
            {"first_k_dense_replace": 2, "num_experts_per_tok": 257},
        ),
        ("model-feature-not-supported: attention_bias", {"attention_bias": True}),
        ("model-feature-not-supported: rope type", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("model-config-not-valid: kv_lora_rank is", {"kv_lora_rank": 0}),
        ("model-config-not-valid: rope_interleave is", {"rope_interleave": 1}),
        ("model-feature-not-supported: hidden_act", {"hidden_act": "gelu"}),
    ],
)
def test_what_mkd_cannot_run_exactly_is_refused(code, change):
    with refused(code):
        ModelShape.from_hf_config(RELEASED | change)
