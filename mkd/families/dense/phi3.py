"""Phi-3 and dense Phi-4: fused tensors on disk, LongRoPE, rotation of only a part of each head."""

from __future__ import annotations

from mkd.families.family import Family, HFConfig, swiglu_layers, with_windows
from mkd.families.layer_shape import LayerShape
from mkd.families.rope_config import read_rope
from mkd.families.weight_rules import FUSED


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    layers = swiglu_layers(config, read_rope(config, head_dim, is_partial=True))
    return with_windows(layers, config, kinds=None)


PHI3 = Family(
    "phi3",
    _read_layers,
    FUSED,
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
)
