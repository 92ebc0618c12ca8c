"""Check config.json of the families of `tests/tiny_families.py`: defaults, and what mkd refuses by name."""

from __future__ import annotations

import pytest

from mkd.plan.models.model_shape import ModelShape
from tests.reported import refused

SIZES = dict(num_hidden_layers=4, hidden_size=320, intermediate_size=96, vocab_size=300)
SIZES |= dict(num_attention_heads=40)
LETTERS, DYNAMIC = (
    dict(sliding_window_pattern="LLLG", num_key_value_heads=8),
    dict(type="dynamic", factor=2.0),
)


TWO_LAYERS = {"mlp_layer_types": ["dense", "sparse"]}


def read(model_type, **more):
    return ModelShape.from_hf_config(SIZES | {"model_type": model_type} | more)


@pytest.mark.parametrize(
    ("code", "model_type", "more"),
    [
        ("model-config-not-valid: mlp_layer_types names 2", "glm4_moe_lite", TWO_LAYERS),
        ("model-config-not-valid: mlp_layer_types", "glm4_moe_lite", {"mlp_layer_types": ["wide"] * 4}),
        ("model-feature-not-supported: norm_topk_prob", "glm4_moe", {"norm_topk_prob": False}),
        ("model-config-not-valid: no_rope_layers has 3", "smollm3", {"no_rope_layers": [1, 1, 0]}),
        (
            "model-feature-not-supported: use_sliding_window",
            "smollm3",
            {"layer_types": ["sliding_attention"] * 4, "sliding_window": 8},
        ),
        (
            "model-config-not-valid: key 'llama_4_scaling_beta'",
            "ministral3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        ),
        ("model-feature-not-supported: kind mamba", "granitemoehybrid", {}),
        ("model-feature-not-supported: 8 experts", "granitemoehybrid", {"layer_types": ["attention"] * 4}),
        (
            "model-config-not-valid: name different kinds",
            "granitemoehybrid",
            {"layer_types": ["full_attention"] * 4, "layers_block_type": ["mamba"] * 4},
        ),
        (
            "model-feature-not-supported: 8 experts",  # so the other key alone is read
            "granitemoehybrid",
            {"layers_block_type": ["attention"] * 4},
        ),
        ("model-feature-not-supported: attention_bias", "olmo3", {"attention_bias": True}),
        ("model-config-not-valid: sliding_window_pattern is 'LLLG'", "exaone4", LETTERS),
        ("model-feature-not-supported: 'dynamic'", "hunyuan_v1_dense", {"rope_scaling": DYNAMIC}),
        ("model-feature-not-supported: router_jitter_noise", "minimax_m2", {"router_jitter_noise": 0.1}),
        ("model-feature-not-supported: shared_intermediate", "minimax_m2", {"shared_intermediate_size": 64}),
        ("model-feature-not-supported: scoring_func", "minimax_m2", {"scoring_func": "softmax"}),
        ("model-feature-not-supported: hidden_act 'gelu'", "apertus", {"hidden_act": "gelu"}),
        ("model-config-not-valid: residual_multiplier is", "granite", {"residual_multiplier": 0}),
    ],
)
def test_what_mkd_cannot_run_exactly_is_refused(code, model_type, more):
    with refused(code):
        read(model_type, **more)


def test_every_fourth_layer_of_smollm3_does_not_see_positions():
    assert [layer.rope is None for layer in read("smollm3").layers] == [False, False, False, True]
    given = read("smollm3", no_rope_layers=[0, 1, 1, 1, 1], use_sliding_window=True, sliding_window=8)
    assert [layer.rope is None for layer in given.layers] == [True, False, False, False]
    assert [layer.sliding_window for layer in given.layers] == [8, None, None, None]


@pytest.mark.parametrize(
    ("window", "context", "kept"), [(262144, 131072, None), (64, 64, None), (63, 64, 63)]
)
def test_a_window_as_long_as_the_context_is_none(window, context, kept):
    """Phi-4-mini has such a window. It hides nothing, and would exclude faster kernels."""
    shape = read("phi3", sliding_window=window, max_position_embeddings=context)
    assert shape.common("sliding_window") == kept


def test_local_layers_keep_their_rope_without_a_window():
    shape = read("gemma3_text", sliding_window=64, max_position_embeddings=64, num_hidden_layers=6)
    assert shape.sliding_windows == () and len(shape.ropes) == 2


# Not an alias, which transformers does not know; granitemoehybrid would have Mamba, exaone4's heads differ.
TYPES = (
    "glm4_moe glm4_moe_lite minimax_m2 seed_oss smollm3 ministral3 granite olmo3 hunyuan_v1_dense ernie4_5 "
    "apertus"
)


@pytest.mark.parametrize("model_type", TYPES.split())
def test_missing_keys_are_those_of_transformers(model_type):
    from transformers import AutoConfig

    ours, theirs = read(model_type), AutoConfig.for_model(model_type, **SIZES).to_dict()
    assert ours.differences(ModelShape.from_hf_config(theirs)) == []
    assert ours.max_position_embeddings == theirs["max_position_embeddings"]
