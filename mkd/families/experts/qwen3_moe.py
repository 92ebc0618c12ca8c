"""Qwen3-MoE: Qwen3 with experts in all layers, or in those that the configuration chooses.

The text model of Qwen3-VL-MoE is one too. Its tensors hold all experts of a layer, each matrix [in, out] as
released. transformers 5 writes [out, in] for some models, and reads both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from mkd.errors import UsageError
from mkd.families.dense.qwen3 import QWEN3
from mkd.families.experts.expert_shapes import softmax_experts
from mkd.families.family import Family, HFConfig
from mkd.families.layer_shape import LayerShape
from mkd.families.weight_rules import SEPARATE, Entry, Stack, with_experts


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


def _read_layers_with_images(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    width, hidden = config["moe_intermediate_size"], config["hidden_size"]
    if hidden in (width, 2 * width):
        what = f"moe_intermediate_size {width} with hidden_size {hidden} is not supported"
        why = "a matrix of an expert is square, and transformers tells its direction by its sides"
        raise UsageError(what, why, "use a model of other sizes", code="model-feature-not-supported")
    return _read_layers({**config, "norm_topk_prob": True, "use_sliding_window": False}, head_dim)


def _stacks() -> Mapping[str, Entry]:
    table = with_experts(
        SEPARATE, ("mlp.experts.gate_up_proj",) * 2, "mlp.experts.down_proj", "mlp.gate.weight"
    )
    stacked = {name: replace(one, stack=Stack(True)) for name, one in table.items() if "{expert}" in name}
    return MappingProxyType(dict(table) | stacked)


QWEN3_VL_MOE = Family(
    "qwen3_vl_moe_text",
    _read_layers_with_images,
    _stacks(),
    defaults={
        "num_key_value_heads": 16,
        "max_position_embeddings": 128000,
        "intermediate_size": 5632,
        "num_local_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 5e5,
    },
    reads_turned_stacks=True,
)
