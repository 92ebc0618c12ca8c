"""Check which layers have experts against transformers, and refusals of routing that mkd does not have."""

from __future__ import annotations

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from mkd.errors import CheckpointError, UsageError
from mkd.plan.models.model_shape import ModelShape
from tests.reported import refused

SIZES = dict(
    num_hidden_layers=5,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    num_experts_per_tok=2,
)
QWEN3 = dict(SIZES, model_type="qwen3_moe", num_experts=6, moe_intermediate_size=8)
MIXTRAL = dict(SIZES, model_type="mixtral", num_local_experts=6)


@pytest.mark.parametrize(
    "config",
    [
        QWEN3,
        QWEN3 | dict(mlp_only_layers=[0, 3], norm_topk_prob=True),
        QWEN3 | dict(decoder_sparse_step=2),
        MIXTRAL,
    ],
)
def test_layers_with_experts_are_those_of_transformers(config):
    ours = ModelShape.from_hf_config(config)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    has_experts = [hasattr(layer.mlp, "experts") for layer in theirs.model.layers]
    assert [not layer.is_dense for layer in ours.layers] == has_experts
    experts = next(layer.mlp.experts for layer in theirs.model.layers if hasattr(layer.mlp, "experts"))
    assert experts.gate_up_proj.shape == (6, 2 * ours.moe.ffn_hidden_size, 32)
    assert ours.moe.normalizes_top_k == config.get("norm_topk_prob", config is MIXTRAL)
    assert ours.moe.top_k == 2 and ours.num_experts == 6


@pytest.mark.parametrize(
    ("config", "error", "code"),
    [
        (
            QWEN3 | dict(num_experts_per_tok=7),
            CheckpointError,
            "model-config-not-valid: is above the number of experts",
        ),
        (MIXTRAL | dict(num_experts_per_tok=1), UsageError, "model-feature-not-supported: per_tok 1"),
        (MIXTRAL | dict(router_jitter_noise=0.1), UsageError, "model-feature-not-supported: jitter"),
        (QWEN3 | dict(mlp_only_layers=[-1]), CheckpointError, "model-config-not-valid: mlp_only_layers"),
    ],
)
def test_refusals(config, error, code):
    with refused(code, error):
        ModelShape.from_hf_config(config)
