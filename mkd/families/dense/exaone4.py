"""EXAONE 4: norms behind attention and MLP alone, norms of heads, and windows in layers that see positions.

In a model with windows the layers with full attention do not see positions. In a model without windows all
layers see them.
"""

from __future__ import annotations

from types import MappingProxyType

from mkd.families.family import (
    FULL,
    Family,
    HFConfig,
    changed_by_kind,
    kinds_by_pattern,
    layer_kinds,
    swiglu_layers,
    with_windows,
)
from mkd.families.layer_shape import LayerShape
from mkd.families.rope_config import read_rope
from mkd.families.weight_rules import SEPARATE, with_post_norms


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    fields = dict(qk_norm=True, pre_norms=False, post_norms=True)
    layers = swiglu_layers(config, read_rope(config, head_dim), **fields)
    if config.get("sliding_window") is None:
        return with_windows(layers, config, config.get("layer_types") or [FULL])
    kinds = layer_kinds(config, len(layers), kinds_by_pattern(config))
    return with_windows(changed_by_kind(layers, kinds, FULL, rope=None), config, kinds)


EXAONE4 = Family(
    "exaone4",
    _read_layers,
    MappingProxyType(with_post_norms(SEPARATE)),
    defaults={
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
)
