"""Qwen3: norms of query and key heads."""

from __future__ import annotations

from mkd.families.family import Family, HFConfig, swiglu_layers, with_switched_windows
from mkd.families.layer_shape import LayerShape
from mkd.families.rope_config import read_rope
from mkd.families.weight_rules import SEPARATE


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    bias = config.get("attention_bias", False)
    fields = dict(qkv_bias=bias, attention_output_bias=bias, qk_norm=True)
    return with_switched_windows(swiglu_layers(config, read_rope(config, head_dim), **fields), config)


QWEN3 = Family(
    "qwen3",
    _read_layers,
    SEPARATE,
    defaults={
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_position_embeddings": 32768,
        "head_dim": 128,
    },
)
