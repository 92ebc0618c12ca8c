"""Qwen3-MoE: Qwen3 with experts in all layers, or in those that the configuration chooses."""

from __future__ import annotations

from dataclasses import replace

from mkd.families.dense.qwen3 import QWEN3
from mkd.families.experts.expert_shapes import softmax_experts
from mkd.families.family import Family, HFConfig
from mkd.families.layer_shape import LayerShape
from mkd.families.weight_rules import SEPARATE, with_experts


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    windows = {"max_window_layers": 0, "layer_types": None}  # all layers have the window, if there is one
    layers = QWEN3.read_layers({**config, **windows}, head_dim)
    num_experts = config.get("num_experts") or config["num_local_experts"]  # the latter in transformers 5
    experts = softmax_experts(
        num_experts,
        config["num_experts_per_tok"],
        config["moe_intermediate_size"],
        normalizes_top_k=config["norm_topk_prob"],
    )
    dense, step = set(config["mlp_only_layers"]), config["decoder_sparse_step"]
    return tuple(
        replace(layer, moe=experts) if index not in dense and (index + 1) % step == 0 else layer
        for index, layer in enumerate(layers)
    )


QWEN3_MOE = Family(
    "qwen3_moe",
    _read_layers,
    with_experts(
        SEPARATE,
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
        "mlp.experts.{expert}.down_proj.weight",
        "mlp.gate.weight",
    ),
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "sliding_window": 4096,
    },
)
