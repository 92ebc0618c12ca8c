"""Mistral. If a model of this type names the kinds of its layers, transformers calls it ministral."""

from __future__ import annotations

from mkd.families.family import Family, HFConfig, swiglu_layers, with_windows
from mkd.families.layer_shape import LayerShape
from mkd.families.rope_config import read_rope
from mkd.families.weight_rules import SEPARATE


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    layers = swiglu_layers(config, read_rope(config, head_dim))
    return with_windows(layers, config, config.get("layer_types"))


MISTRAL = Family(
    "mistral",
    _read_layers,
    SEPARATE,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
)
