"""DeepSeek-V3, Moonlight and Kimi K2: multi-head latent attention, sigmoid routing, shared experts.

The first layers have dense MLPs. Moonlight has the same model_type without a latent of the queries.
transformers norms the latents with an epsilon of 1e-6 whatever `rms_norm_eps` says. The layers for
multi-token prediction are not trained: an export copies them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mkd.errors import UsageError
from mkd.families.experts.expert_shapes import sigmoid_experts, with_shared_experts
from mkd.families.family import Family, HFConfig, swiglu_layers
from mkd.families.layer_shape import LayerShape, MLAShape
from mkd.families.rope_config import read_rope, yarn_scale
from mkd.families.weight_rules import HIDDEN, LAYER, SEPARATE, Entry, ModelSizes, Rule

Size = Callable[[ModelSizes, LayerShape | None], int]


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    first = config["first_k_dense_replace"]
    return latent_layers(config, [index >= first for index in range(config["num_hidden_layers"])])


def latent_layers(config: HFConfig, has_experts: Sequence[bool]) -> tuple[LayerShape, ...]:
    """Return layers with latent attention; `has_experts` says of each whether it has experts or an MLP."""
    if config.get("attention_bias"):
        what, why = "attention_bias true is not supported", "mkd's latent attention has no biases"
        raise UsageError(what, why, "use a model without it", code="model-feature-not-supported")
    rope = read_rope(config, config["qk_rope_head_dim"])
    if rope.kind not in ("default", "yarn"):
        what = f"rope type {rope.kind!r} is not supported"
        why = "DeepSeek-V3 has default and YaRN position embeddings"
        raise UsageError(what, why, "use a model with one of these", code="model-feature-not-supported")
    dense = swiglu_layers(config, rope, mla=_read_mla(config))
    experts = sigmoid_experts(config) if any(has_experts) else None
    return tuple(
        replace(layer, moe=experts if has else None) for layer, has in zip(dense, has_experts, strict=True)
    )


def _read_mla(config: HFConfig) -> MLAShape:
    return MLAShape(
        q_lora_rank=config.get("q_lora_rank"),
        kv_lora_rank=config["kv_lora_rank"],
        qk_nope_head_dim=config["qk_nope_head_dim"],
        qk_rope_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
        interleaved_rope=config.get("rope_interleave", True),
    )


def read_latent_model(config: HFConfig) -> dict[str, Any]:
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
    return with_shared_experts(before | _attention_table() | after)


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
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    read_model=read_latent_model,
)

# Kimi K2 names the architecture after itself. transformers does not know the name; the weights are the same.
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2")
