"""Llama 1 to 3, and models that use its model_type (SmolLM2)."""

from __future__ import annotations

from mkd.families.family import Family, HFConfig, swiglu_layers
from mkd.families.layer_shape import LayerShape
from mkd.families.rope_config import read_rope
from mkd.families.weight_rules import SEPARATE


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    bias = config.get("attention_bias", False)
    biases = dict(qkv_bias=bias, attention_output_bias=bias, mlp_bias=config.get("mlp_bias", False))
    return swiglu_layers(config, read_rope(config, head_dim), **biases)


LLAMA = Family("llama", _read_layers, SEPARATE, defaults={"max_position_embeddings": 2048})
