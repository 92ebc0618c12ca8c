"""Ministral 3's text model: Mistral whose queries grow beyond the original context."""

from __future__ import annotations

from dataclasses import replace

from mkd.families.family import Family, HFConfig, swiglu_layers, with_windows
from mkd.families.layer_shape import LayerShape
from mkd.families.rope_config import original_positions, read_rope
from mkd.families.weight_rules import SEPARATE


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    scaling = config.get("rope_scaling") or config["rope_parameters"]
    rope = replace(
        read_rope(config, head_dim),
        original_max_position_embeddings=original_positions(config, scaling),
        query_growth=float(scaling["llama_4_scaling_beta"]),
    )
    return with_windows(swiglu_layers(config, rope), config, kinds=None)


MINISTRAL3 = Family(
    "ministral3",
    _read_layers,
    SEPARATE,
    defaults={
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
)
