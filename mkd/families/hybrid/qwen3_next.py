"""Qwen3-Next: gated delta nets and gated attention, experts with a gated MLP beside them."""

from __future__ import annotations

from dataclasses import replace

from mkd.families.experts.expert_shapes import softmax_experts
from mkd.families.family import Family, HFConfig
from mkd.families.hybrid.delta_nets import (
    CARRIED,
    DEFAULTS,
    FUSED_PROJECTION,
    delta_layers,
    delta_table,
    gated_experts,
    read_zero_centered,
    with_shared_experts,
)
from mkd.families.layer_shape import LayerShape


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    layers = delta_layers(config, head_dim)
    experts = gated_experts(
        softmax_experts(
            config["num_experts"],
            config["num_experts_per_tok"],
            config["moe_intermediate_size"],
            normalizes_top_k=config["norm_topk_prob"],
        ),
        config,
    )
    dense, step = set(config["mlp_only_layers"]), config["decoder_sparse_step"]
    return tuple(
        replace(layer, moe=experts) if index not in dense and (index + 1) % step == 0 else layer
        for index, layer in enumerate(layers)
    )


QWEN3_NEXT = Family(
    "qwen3_next",
    _read_layers,
    with_shared_experts(delta_table(FUSED_PROJECTION, ("in_proj_qkvz", "in_proj_ba"))),
    defaults=DEFAULTS
    | {
        "num_key_value_heads": 2,
        "intermediate_size": 5632,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    read_model=read_zero_centered,
    carried=CARRIED,
)
