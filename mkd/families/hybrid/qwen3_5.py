"""Text models of Qwen3.5: gated delta nets and gated attention, with dense MLPs or with experts.

Releases have them behind a vision tower (`qwen3_5`, `qwen3_5_moe`, see `mkd/families/vision.py`). Those with
experts have all experts of a layer in one tensor; transformers writes one tensor an expert, and reads both.
"""

from __future__ import annotations

from dataclasses import replace

from mkd.families.experts.expert_shapes import softmax_experts
from mkd.families.family import Family, HFConfig
from mkd.families.hybrid.delta_nets import (
    CARRIED,
    DEFAULTS,
    delta_layers,
    delta_table,
    gated_experts,
    read_zero_centered,
    with_shared_experts,
)
from mkd.families.hybrid.mixer_rules import PROJECTION
from mkd.families.layer_shape import LayerShape

_PROJECTED = ("in_proj_qkv",) * 3 + ("in_proj_z", "in_proj_b", "in_proj_a")
_TENSORS = delta_table(PROJECTION, _PROJECTED)


def _read_moe_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    width = config["moe_intermediate_size"]
    layers = delta_layers({**config, "intermediate_size": width}, head_dim)
    experts = softmax_experts(config["num_experts"], config["num_experts_per_tok"], width)
    return tuple(replace(layer, moe=gated_experts(experts, config)) for layer in layers)


QWEN3_5 = Family(
    "qwen3_5_text",
    delta_layers,
    _TENSORS,
    defaults=DEFAULTS | {"num_key_value_heads": 4, "intermediate_size": 12288},
    read_model=read_zero_centered,
    carried=CARRIED,
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text",
    _read_moe_layers,
    with_shared_experts(_TENSORS),
    defaults=DEFAULTS
    | {
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    read_model=read_zero_centered,
    carried=CARRIED,
    reads_stacked_experts=True,
)
