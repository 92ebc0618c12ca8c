"""MiniMax-M2: one norm of all heads, half of a head rotates, DeepSeek-V3's routing without groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from mkd.errors import UsageError
from mkd.families.experts.expert_shapes import sigmoid_experts
from mkd.families.experts.mixtral import MIXTRAL, refuse_jitter
from mkd.families.family import Family, HFConfig, joint_norm_channels, swiglu_layers
from mkd.families.layer_shape import LayerShape
from mkd.families.rope_config import read_rope
from mkd.families.weight_rules import LAYER, ROUTER_BIAS, Entry


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    refuse_jitter(config)
    if config.get("shared_intermediate_size"):
        what = f"shared_intermediate_size {config['shared_intermediate_size']} is not supported"
        why = "transformers runs MiniMax-M2 without shared experts"
        raise UsageError(what, why, "use a model without them", code="model-feature-not-supported")
    sizes = dict(
        n_routed_experts=config["num_local_experts"], moe_intermediate_size=config["intermediate_size"]
    )
    plain = dict(n_group=1, topk_group=1, n_shared_experts=0, routed_scaling_factor=1.0, norm_topk_prob=True)
    experts = sigmoid_experts({**config, **sizes, **plain})
    part = {"partial_rotary_factor": config["rotary_dim"] / head_dim} if "rotary_dim" in config else {}
    rope = read_rope({**config, **part}, head_dim, is_partial=True)
    layers = swiglu_layers(config, rope, joint_qk_norm=joint_norm_channels(config, head_dim))
    return tuple(replace(layer, moe=experts) for layer in layers)


def _tensors() -> Mapping[str, Entry]:
    bias = Entry(ROUTER_BIAS, (f"{LAYER}block_sparse_moe.e_score_correction_bias",), "has_correction_bias")
    return MappingProxyType(dict(MIXTRAL.tensors) | {"mlp.router.expert_bias": bias})


MINIMAX_M2 = Family(
    "minimax_m2",
    _read_layers,
    _tensors(),
    defaults={
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "rope_theta": 5e6,
    },
)
