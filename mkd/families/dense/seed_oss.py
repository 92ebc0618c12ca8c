"""Seed-OSS: Llama with biases on query, key and value."""

from __future__ import annotations

from mkd.families.family import Family, HFConfig, swiglu_layers
from mkd.families.layer_shape import LayerShape
from mkd.families.rope_config import read_rope
from mkd.families.weight_rules import SEPARATE


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    return swiglu_layers(
        config,
        read_rope(config, head_dim),
        qkv_bias=config["attention_bias"],
        attention_output_bias=config["attention_out_bias"],
        mlp_bias=config["mlp_bias"],
    )


SEED_OSS = Family(
    "seed_oss",
    _read_layers,
    SEPARATE,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
    },
)
