"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from __future__ import annotations

from mkd.families.family import Family, HFConfig, repeat_layer, require_silu, with_switched_windows
from mkd.families.layer_shape import LayerShape
from mkd.families.rope_config import read_rope
from mkd.families.weight_rules import SEPARATE


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    require_silu(config)
    layer = LayerShape(
        ffn_hidden_size=config["intermediate_size"], rope=read_rope(config, head_dim), qkv_bias=True
    )
    return with_switched_windows(repeat_layer(layer, config), config)


QWEN2 = Family(
    "qwen2",
    _read_layers,
    SEPARATE,
    defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_position_embeddings": 32768},
)
