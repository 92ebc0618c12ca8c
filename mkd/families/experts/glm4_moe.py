"""GLM-4.5 to 4.7: grouped-query attention before DeepSeek-V3's experts. The first layers have dense MLPs.

The layer for multi-token prediction is not trained: an export copies it.
"""

from __future__ import annotations

from dataclasses import replace

from mkd.families.experts.expert_shapes import sigmoid_experts, with_shared_experts
from mkd.families.family import Family, HFConfig, swiglu_layers
from mkd.families.layer_shape import LayerShape
from mkd.families.rope_config import read_rope
from mkd.families.weight_rules import SEPARATE


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    rope = read_rope(config, head_dim, is_partial=True)
    dense = swiglu_layers(config, rope, qkv_bias=config["attention_bias"], qk_norm=config["use_qk_norm"])
    first = config["first_k_dense_replace"]
    if first >= len(dense):
        return dense
    experts = sigmoid_experts(config)
    return dense[:first] + tuple(replace(layer, moe=experts) for layer in dense[first:])


GLM4_MOE = Family(
    "glm4_moe",
    _read_layers,
    with_shared_experts(SEPARATE),
    defaults={
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": False,
    },
)
