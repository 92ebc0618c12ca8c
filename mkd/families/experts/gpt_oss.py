"""GPT-OSS: attention sinks, windows in every other layer, and experts with biases and clamped gates.

Each tensor of the experts holds all experts of a layer. Released checkpoints quantise them to MXFP4.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mkd.errors import UsageError
from mkd.families.experts.expert_shapes import softmax_experts
from mkd.families.family import Family, HFConfig, swiglu_layers, with_windows
from mkd.families.layer_shape import QUICK_GELU_GAIN, LayerShape
from mkd.families.rope_config import read_rope
from mkd.families.weight_rules import (
    EXPERT_DOWN,
    EXPERT_DOWN_BIAS,
    EXPERT_GATE_UP,
    EXPERT_GATE_UP_BIAS,
    LAYER,
    ROUTER,
    ROUTER_BIAS,
    SEPARATE,
    Entry,
    Stack,
)


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    if config["swiglu_alpha"] != QUICK_GELU_GAIN:
        what = f"swiglu_alpha {config['swiglu_alpha']} is not supported"
        why = f"mkd's gate is x sigmoid({QUICK_GELU_GAIN} x)"
        raise UsageError(what, why, f"use a model with {QUICK_GELU_GAIN}", code="model-feature-not-supported")
    experts = softmax_experts(
        config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"], biases=True
    )
    layers = swiglu_layers(
        config,
        read_rope(config, head_dim),
        activation="quick_gelu",
        mlp_limit=float(config["swiglu_limit"]),
        up_offset=1.0,
        qkv_bias=config["attention_bias"],
        attention_output_bias=config["attention_bias"],
        attention_sinks=True,
        moe=experts,
    )
    alternating = [("sliding_attention", "full_attention")[index % 2] for index in range(len(layers))]
    return with_windows(layers, config, config.get("layer_types") or alternating)


def _tensors() -> Mapping[str, Entry]:
    attention = {name: entry for name, entry in SEPARATE.items() if not name.startswith("mlp.")}
    gate_up, down = f"{LAYER}mlp.experts.gate_up_proj", f"{LAYER}mlp.experts.down_proj"
    expert = "mlp.experts.local_experts.{expert}."
    experts = {  # channel 2 c of `gate_up_proj` is that of gate c, channel 2 c + 1 that of up projection c
        f"{expert}linear_fc1.weight": Entry(EXPERT_GATE_UP, (gate_up,) * 2, stack=Stack(True, 2)),
        f"{expert}linear_fc1.bias": Entry(
            EXPERT_GATE_UP_BIAS, (f"{gate_up}_bias",) * 2, stack=Stack(False, 2)
        ),
        f"{expert}linear_fc2.weight": Entry(EXPERT_DOWN, (down,), stack=Stack(True)),
        f"{expert}linear_fc2.bias": Entry(EXPERT_DOWN_BIAS, (f"{down}_bias",), stack=Stack()),
    }
    router = {
        "mlp.router.weight": Entry(ROUTER, (f"{LAYER}mlp.router.weight",)),
        "mlp.router.bias": Entry(ROUTER_BIAS, (f"{LAYER}mlp.router.bias",)),
    }
    return MappingProxyType(attention | router | experts)


GPT_OSS = Family(
    "gpt_oss",
    _read_layers,
    _tensors(),
    defaults={
        "attention_bias": True,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "swiglu_alpha": QUICK_GELU_GAIN,
        "swiglu_limit": 7.0,
    },
)
