"""DeepSeek-V3 and Moonlight: multi-head latent attention, sigmoid routing, shared experts.

The first layers have dense MLPs. Moonlight has the same model_type without a latent of the queries.
transformers norms the latents with an epsilon of 1e-6 whatever `rms_norm_eps` says. The layers for
multi-token prediction are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mkd.errors import UsageError
from mkd.families.expert_shapes import require_groups, require_top_k
from mkd.families.family import Family, HFConfig, swiglu_layers
from mkd.families.layer_shape import LayerShape, MLAShape, MoEShape
from mkd.families.rope_config import read_rope, yarn_scale
from mkd.families.weight_rules import (
    HIDDEN,
    LAYER,
    ROUTER_BIAS,
    SEPARATE,
    SHARED_DOWN,
    SHARED_GATE_UP,
    Entry,
    ModelSizes,
    Rule,
    with_experts,
)

# Keys of config.json that choose how tokens are routed. transformers ignores those of the first releases.
_ROUTING: Mapping[str, bool | int | str] = MappingProxyType(
    {"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
)

Size = Callable[[ModelSizes, LayerShape | None], int]


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    if config.get("attention_bias"):
        what, why = "attention_bias true is not supported", "mkd's latent attention has no biases"
        raise UsageError(what, why, "use a model without it", code="model-feature-not-supported")
    rope = read_rope(config, config["qk_rope_head_dim"])
    if rope.kind not in ("default", "yarn"):
        what = f"rope type {rope.kind!r} is not supported"
        why = "DeepSeek-V3 has default and YaRN position embeddings"
        raise UsageError(what, why, "use a model with one of these", code="model-feature-not-supported")
    dense = swiglu_layers(config, rope, mla=_read_mla(config))
    first = config["first_k_dense_replace"]
    if first >= len(dense):
        return dense
    experts = _read_experts(config)
    return dense[:first] + tuple(replace(layer, moe=experts) for layer in dense[first:])


def _read_experts(config: HFConfig) -> MoEShape:
    num_experts, top_k, width = (
        config[name] for name in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    )
    groups, top_groups = config["n_group"], config["topk_group"]
    require_top_k(num_experts, top_k)
    require_groups(num_experts, top_k, groups, top_groups)
    for name, supported in _ROUTING.items():
        if config.get(name, supported) != supported:
            what = f"{name} {_written(config[name])} is not supported"
            why = f"mkd routes as DeepSeek-V3 does, with {name} {_written(supported)}"
            raise UsageError(what, why, "use a model that routes so", code="model-feature-not-supported")
    if top_groups < groups and top_k // top_groups != 2:
        what = f"{top_k} experts in {top_groups} of {groups} groups are not supported"
        why = "groups are chosen by the sum of 2 scores, which must be the number of experts of a group"
        raise UsageError(what, why, "use a model with 2 for each group", code="model-feature-not-supported")
    return MoEShape(
        num_experts,
        top_k,
        width,
        scores="sigmoid",
        scaling_factor=float(config["routed_scaling_factor"]),
        num_groups=groups,
        top_groups=top_groups,
        shared_ffn_hidden_size=config["n_shared_experts"] * width,
        correction_bias=True,
    )


def _written(value: object) -> str:
    """Return a value of config.json as JSON writes it."""
    return json.dumps(value).strip('"')


def _read_mla(config: HFConfig) -> MLAShape:
    return MLAShape(
        q_lora_rank=config.get("q_lora_rank"),
        kv_lora_rank=config["kv_lora_rank"],
        qk_nope_head_dim=config["qk_nope_head_dim"],
        qk_rope_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
        interleaved_rope=config.get("rope_interleave", True),
    )


def _read_model(config: HFConfig) -> dict[str, Any]:
    """Return sizes of the heads, and the scale of attention, which grows with YaRN's `mscale_all_dim`."""
    width = _read_mla(config).qk_head_dim
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scale = None
    if read_rope(config, width).kind == "yarn" and scaling.get("mscale_all_dim"):
        scale = yarn_scale(scaling["factor"], scaling["mscale_all_dim"]) ** 2 / width**0.5
    return {"head_dim": width, "num_query_groups": config["num_attention_heads"], "attention_scale": scale}


def _mla(layer: LayerShape | None) -> MLAShape:
    assert layer is not None and layer.mla is not None, "latent attention belongs to a layer"
    return layer.mla


def _by_head(rows: Size, columns: Size, dim: int = 0) -> Rule:
    """Return the rule of a matrix with `rows` of each head, or columns if `dim` is 1."""
    return Rule(
        lambda model, layer, ranks: model.num_query_groups,
        lambda model, layer, ranks: (rows(model, layer),),
        dim=dim,
        other_dims=lambda model, layer: (columns(model, layer),),
    )


def _replicated(rows: Size, *columns: Size) -> Rule:
    return Rule(
        lambda model, layer, ranks: 1,
        lambda model, layer, ranks: (rows(model, layer),),
        other_dims=lambda model, layer: tuple(size(model, layer) for size in columns),
        replicated=True,
    )


def _hidden(model: ModelSizes, layer: LayerShape | None) -> int:
    return model.hidden_size


def _query(model: ModelSizes, layer: LayerShape | None) -> int:
    return _mla(layer).qk_head_dim


def _query_latent(model: ModelSizes, layer: LayerShape | None) -> int:
    return _mla(layer).q_lora_rank or 0


def _latent(model: ModelSizes, layer: LayerShape | None) -> int:
    return _mla(layer).kv_lora_rank


def _latent_and_key(model: ModelSizes, layer: LayerShape | None) -> int:
    return _mla(layer).kv_lora_rank + _mla(layer).qk_rope_head_dim


def _key_and_value(model: ModelSizes, layer: LayerShape | None) -> int:
    return _mla(layer).qk_nope_head_dim + _mla(layer).v_head_dim


def _value(model: ModelSizes, layer: LayerShape | None) -> int:
    return _mla(layer).v_head_dim


def _attention_table() -> dict[str, Entry]:
    """Return the parameters of latent attention, in the order of the export."""
    latent, direct = "mla.q_lora_rank", "mla.has_direct_query"
    rows = (
        ("linear_q_proj", "q_proj", _by_head(_query, _hidden), direct),
        ("linear_q_down_proj", "q_a_proj", _replicated(_query_latent, _hidden), latent),
        ("q_layernorm", "q_a_layernorm", _replicated(_query_latent), latent),
        ("linear_q_up_proj", "q_b_proj", _by_head(_query, _query_latent), latent),
        ("linear_kv_down_proj", "kv_a_proj_with_mqa", _replicated(_latent_and_key, _hidden), ""),
        ("kv_layernorm", "kv_a_layernorm", _replicated(_latent), ""),
        ("linear_kv_up_proj", "kv_b_proj", _by_head(_key_and_value, _latent), ""),
        ("linear_proj", "o_proj", _by_head(_value, _hidden, dim=1), ""),
    )
    return {
        f"self_attention.{ours}.weight": Entry(rule, (f"{LAYER}self_attn.{theirs}.weight",), needs)
        for ours, theirs, rule, needs in rows
    }


def _tensors() -> Mapping[str, Entry]:
    after = {name: SEPARATE[name] for name in SEPARATE if not name.startswith(("self_attention", "input"))}
    before = {"input_layernorm.weight": Entry(HIDDEN, (f"{LAYER}input_layernorm.weight",))}
    experts = "mlp.experts.{expert}."
    table = with_experts(
        before | _attention_table() | after,
        (f"{experts}gate_proj.weight", f"{experts}up_proj.weight"),
        f"{experts}down_proj.weight",
        "mlp.gate.weight",
    )
    shared = f"{LAYER}mlp.shared_experts."
    bias = Entry(ROUTER_BIAS, (f"{LAYER}mlp.gate.e_score_correction_bias",), "has_correction_bias")
    gate_up = (f"{shared}gate_proj.weight", f"{shared}up_proj.weight")
    return MappingProxyType(
        dict(table)
        | {
            "mlp.router.expert_bias": bias,
            "mlp.shared_experts.linear_fc1.weight": Entry(SHARED_GATE_UP, gate_up, "has_shared_experts"),
            "mlp.shared_experts.linear_fc2.weight": Entry(
                SHARED_DOWN, (f"{shared}down_proj.weight",), "has_shared_experts"
            ),
        }
    )


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    _read_layers,
    _tensors(),
    defaults={
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "kv_lora_rank": 512,
        "max_position_embeddings": 4096,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    read_model=_read_model,
)
