"""Llama 1 to 3, and models that use its model_type (SmolLM2)."""

from __future__ import annotations

from mkd.families.family import Family, HFConfig, repeat_layer, require_silu
from mkd.families.layer_shape import LayerShape
from mkd.families.rope_config import read_rope
from mkd.families.weight_rules import SEPARATE


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    require_silu(config)
    attention_bias = config.get("attention_bias", False)
    layer = LayerShape(
        ffn_hidden_size=config["intermediate_size"],
        rope=read_rope(config, head_dim),
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=config.get("mlp_bias", False),
    )
    return repeat_layer(layer, config)


LLAMA = Family("llama", _read_layers, SEPARATE, defaults={"max_position_embeddings": 2048})
