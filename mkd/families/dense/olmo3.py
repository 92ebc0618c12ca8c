"""OLMo 3: norms behind attention and MLP alone, one norm of all heads, windows in three of four layers."""

from __future__ import annotations

from types import MappingProxyType

from mkd.errors import UsageError
from mkd.families.family import (
    SLIDING,
    Family,
    HFConfig,
    changed_by_kind,
    joint_norm_channels,
    kinds_by_pattern,
    layer_kinds,
    swiglu_layers,
    with_windows,
)
from mkd.families.layer_shape import LayerShape
from mkd.families.rope_config import read_layer_rope
from mkd.families.weight_rules import SEPARATE, with_post_norms

THETA = 500_000.0


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    if config.get("attention_bias"):
        what = "attention_bias true is not supported"
        why = "OLMo 3 normalises the output of attention, which has no bias"
        raise UsageError(what, why, "use a model without it", code="model-feature-not-supported")
    full = read_layer_rope(config, head_dim, "full_attention", config.get("rope_theta", THETA))
    sliding = read_layer_rope(config, head_dim, SLIDING, THETA)  # as transformers, whatever rope_theta is
    channels = joint_norm_channels(config, head_dim)
    layers = swiglu_layers(config, full, pre_norms=False, post_norms=True, joint_qk_norm=channels)
    kinds = layer_kinds(config, len(layers), kinds_by_pattern(config))
    return with_windows(changed_by_kind(layers, kinds, SLIDING, rope=sliding), config, kinds)


OLMO3 = Family(
    "olmo3",
    _read_layers,
    MappingProxyType(with_post_norms(SEPARATE)),
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
)
