"""`LMHead.from_transformers` against the logits of tiny models of transformers."""

from __future__ import annotations

import pytest
import torch
import transformers

from mkd.errors import UsageError
from mkd.losses import LMHead
from tests.reported import refused

SIZES = dict(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=50,
)
MODELS = {
    "Llama": {},
    "Cohere": dict(logit_scale=0.3),
    "Granite": dict(logits_scaling=6.0),
    "HyperCLOVAX": dict(logits_scaling=0.4),
    "Gemma2": dict(final_logit_softcapping=0.5, query_pre_attn_scalar=8),
    "Gemma3": dict(final_logit_softcapping=0.7, query_pre_attn_scalar=8),
    "FalconH1": dict(lm_head_multiplier=0.2, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8),
}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9]])


def build(name, **settings):
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(0)
    config = {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config")
    made = getattr(transformers, config)(**SIZES, pad_token_id=0, **settings)
    return getattr(transformers, f"{name}ForCausalLM")(made).eval()


@pytest.mark.parametrize("name", MODELS)
def test_makes_the_logits_of_the_model(name):
    model = build(name, **MODELS[name])
    LMHead.from_transformers(model).require_logits(model, input_ids=IDS)


def test_refuses_a_head_that_is_not_the_model_s():
    model = build("Granite", logits_scaling=6.0)
    with refused("model-feature-not-supported", UsageError):
        LMHead.of(model.lm_head).require_logits(model, input_ids=IDS)
