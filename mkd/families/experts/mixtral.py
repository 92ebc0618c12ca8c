"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from mkd.errors import UsageError
from mkd.families.experts.expert_shapes import softmax_experts
from mkd.families.family import Family, HFConfig, swiglu_layers, with_windows
from mkd.families.layer_shape import LayerShape
from mkd.families.rope_config import read_rope
from mkd.families.weight_rules import SEPARATE, with_experts


def refuse_jitter(config: HFConfig) -> None:
    """Raise `UsageError` if the router adds noise in training."""
    if config.get("router_jitter_noise"):
        what = f"router_jitter_noise {config['router_jitter_noise']} is not supported"
        why = "noise in the router would make every step depend on the layout"
        raise UsageError(what, why, "set it to 0 in config.json", code="model-feature-not-supported")


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    refuse_jitter(config)
    layers = with_windows(swiglu_layers(config, read_rope(config, head_dim)), config, None)
    width = config["intermediate_size"]
    experts = softmax_experts(config["num_local_experts"], config["num_experts_per_tok"], width)
    return tuple(replace(layer, moe=experts) for layer in layers)


_EXPERT = "block_sparse_moe.experts.{expert}."

MIXTRAL = Family(
    "mixtral",
    _read_layers,
    with_experts(
        SEPARATE,
        (f"{_EXPERT}w1.weight", f"{_EXPERT}w3.weight"),
        f"{_EXPERT}w2.weight",
        "block_sparse_moe.gate.weight",
    ),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
)
