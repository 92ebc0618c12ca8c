"""Dense ERNIE 4.5: Llama that turns neighbouring channels."""

from __future__ import annotations

from dataclasses import replace

from mkd.families.family import Family, HFConfig, swiglu_layers
from mkd.families.layer_shape import LayerShape
from mkd.families.rope_config import read_rope
from mkd.families.weight_rules import SEPARATE


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    bias = config["use_bias"]
    biases = dict(qkv_bias=bias, attention_output_bias=bias, mlp_bias=bias)
    return swiglu_layers(config, replace(read_rope(config, head_dim), interleaved=True), **biases)


ERNIE4_5 = Family(
    "ernie4_5",
    _read_layers,
    SEPARATE,
    defaults={
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
)
