"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from __future__ import annotations

from mkd.families.family import Family, HFConfig, swiglu_layers, with_switched_windows
from mkd.families.layer_shape import LayerShape
from mkd.families.rope_config import read_rope
from mkd.families.weight_rules import SEPARATE


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    layers = swiglu_layers(config, read_rope(config, head_dim), qkv_bias=True)
    return with_switched_windows(layers, config)


QWEN2 = Family(
    "qwen2",
    _read_layers,
    SEPARATE,
    defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_position_embeddings": 32768},
)
