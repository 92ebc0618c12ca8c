"""Nemotron-H: each layer is a Mamba-2 mixer, attention without positions, an MLP, or experts.

One norm is in front of it. MLPs have no gates: their activation is the square of ReLU. Experts may see a
narrow projection of their tokens, and each token passes an MLP beside them. Tokens are routed as in
DeepSeek-V3. Releases name the kind of every layer by a letter of `hybrid_override_pattern`, transformers by a
word of `layers_block_type`; it ignores `num_hidden_layers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mkd.errors import CheckpointError, UsageError
from mkd.families.experts.expert_shapes import sigmoid_experts
from mkd.families.family import Family, HFConfig
from mkd.families.hybrid.mixer_rules import (
    CONVOLUTION,
    CONVOLUTION_BIAS,
    OF_CHANNELS,
    OF_HEADS,
    OUTPUT,
    PROJECTION,
)
from mkd.families.layer_shape import LayerShape, MoEShape
from mkd.families.mixer_shape import MambaShape
from mkd.families.weight_rules import (
    EXPERT_DOWN,
    EXPERT_UP,
    FFN,
    FROM_LATENTS,
    HEADS,
    HIDDEN,
    QKV,
    ROUTER,
    ROUTER_BIAS,
    SHARED_DOWN,
    SHARED_UP,
    TO_LATENTS,
    UP,
    Entry,
    model_table,
)

ROOT = "backbone."
_LAYER = f"{ROOT}layers.{{layer}}."
_EXPERT, _SHARED = "mlp.experts.local_experts.{expert}.", "mlp.shared_experts."
MIXER, ATTENTION, MLP, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
KINDS: Mapping[str, str] = MappingProxyType(
    {"M": MIXER, "*": ATTENTION, "-": MLP, "E": EXPERTS, "mamba": MIXER, "attention": ATTENTION}
    | {kind: kind for kind in (MIXER, ATTENTION, MLP, EXPERTS)}
)
"""Letters and words for the kinds of layers."""
_FORMER: Mapping[str, str] = MappingProxyType(  # names of the first releases
    {"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "time_step_min": "mamba_dt_min"}
    | {"use_conv_bias": "mamba_conv_bias"}
)
_ONLY: Mapping[str, Any] = MappingProxyType(
    {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "use_conv_bias": True}
    | dict.fromkeys(("use_bias", "mlp_bias", "attention_bias", "tie_word_embeddings"), False)
)
"""Values that mkd supports."""


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    config = {**config, **{name: config[former] for name, former in _FORMER.items() if former in config}}
    for name, value in _ONLY.items():
        if config.get(name, value) != value:
            what = f"{name} {config[name]!r} is not supported"
            why = f"released models of this family have {value!r}"
            raise UsageError(what, why, "use a model with it", code="model-feature-not-supported")
    block = LayerShape(ffn_hidden_size=0, rope=None, activation="squared_relu", is_gated=False)
    mlp = replace(block, ffn_hidden_size=config["intermediate_size"], mixes_tokens=False)
    layers = {MIXER: replace(block, mixer=_read_mixer(config)), ATTENTION: block, MLP: mlp}
    kinds = _kinds(config)
    if EXPERTS in kinds:
        layers[EXPERTS] = replace(mlp, moe=_read_experts(config))
    return tuple(layers[kind] for kind in kinds)


def _kinds(config: HFConfig) -> list[str]:
    """Return the kind of every layer."""
    given = config.get("layers_block_type") or config.get("layer_types")
    given = given or config.get("hybrid_override_pattern") or "ME*-"
    for kind in given:
        if kind not in KINDS:
            what = f"layer type {kind!r} is not supported"
            why = f"mkd knows {', '.join((MIXER, ATTENTION, MLP, EXPERTS))} here"
            raise UsageError(what, why, "use a model with these alone", code="model-feature-not-supported")
    return [KINDS[kind] for kind in given]


def _read_mixer(config: HFConfig) -> MambaShape:
    heads, groups = config["mamba_num_heads"], config["n_groups"]
    if heads % groups:
        what = f"mamba_num_heads {heads} is not a multiple of n_groups {groups}"
        why = "each group is shared by the same number of heads"
        raise CheckpointError(what, why, "download config.json again", code="model-config-not-valid")
    return MambaShape(
        groups,
        heads,
        key_dim=config["ssm_state_size"],
        value_dim=config["mamba_head_dim"],
        kernel_size=config["conv_kernel"],
        least_step=config["time_step_min"],
    )


def _read_experts(config: HFConfig) -> MoEShape:
    return replace(
        sigmoid_experts(config),
        shared_ffn_hidden_size=config["moe_shared_expert_intermediate_size"],
        is_gated=False,
        latent_size=config.get("moe_latent_size", 0),
    )


def _read_model(config: HFConfig) -> dict[str, Any]:
    return {"norm_epsilon": config["layer_norm_epsilon"]}


def _tensors() -> Mapping[str, Entry]:
    theirs = f"{_LAYER}mixer."
    rows = (
        ("self_attention.in_proj.weight", PROJECTION, ("in_proj.weight",) * 5, "mixer"),
        ("self_attention.conv_weight", CONVOLUTION, ("conv1d.weight",) * 3, "mixer"),
        ("self_attention.conv_bias", CONVOLUTION_BIAS, ("conv1d.bias",) * 3, "mixer"),
        ("self_attention.A_log", OF_HEADS, ("A_log",), "mixer"),
        ("self_attention.D", OF_HEADS, ("D",), "mixer"),
        ("self_attention.dt_bias", OF_HEADS, ("dt_bias",), "mixer"),
        ("self_attention.norm_weight", OF_CHANNELS, ("norm.weight",), "mixer"),
        ("self_attention.out_proj.weight", OUTPUT, ("out_proj.weight",), "mixer"),
        (
            "self_attention.linear_qkv.weight",
            QKV,
            tuple(f"{part}_proj.weight" for part in "qkv"),
            "has_attention",
        ),
        ("self_attention.linear_proj.weight", HEADS, ("o_proj.weight",), "has_attention"),
        ("mlp.linear_fc1.weight", UP, ("up_proj.weight",), "has_dense_mlp"),
        ("mlp.linear_fc2.weight", FFN, ("down_proj.weight",), "has_dense_mlp"),
        ("mlp.router.weight", ROUTER, ("gate.weight",), "moe"),
        ("mlp.router.expert_bias", ROUTER_BIAS, ("gate.e_score_correction_bias",), "moe"),
        ("mlp.latent_down.weight", TO_LATENTS, ("fc1_latent_proj.weight",), "has_expert_latents"),
        (f"{_EXPERT}linear_fc1.weight", EXPERT_UP, ("experts.{expert}.up_proj.weight",), "moe"),
        (f"{_EXPERT}linear_fc2.weight", EXPERT_DOWN, ("experts.{expert}.down_proj.weight",), "moe"),
        ("mlp.latent_up.weight", FROM_LATENTS, ("fc2_latent_proj.weight",), "has_expert_latents"),
        (f"{_SHARED}linear_fc1.weight", SHARED_UP, ("shared_experts.up_proj.weight",), "moe"),
        (f"{_SHARED}linear_fc2.weight", SHARED_DOWN, ("shared_experts.down_proj.weight",), "moe"),
    )
    norm = f"{_LAYER}norm.weight"
    return MappingProxyType(
        {
            "input_layernorm.weight": Entry(HIDDEN, (norm,), "mixes_tokens"),
            "pre_mlp_layernorm.weight": Entry(HIDDEN, (norm,), "has_mlp"),
        }
        | {
            ours: Entry(rule, tuple(theirs + name for name in names), needs)
            for ours, rule, names, needs in rows
        }
    )


NEMOTRON_H = Family(
    "nemotron_h",
    _read_layers,
    _tensors(),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "intermediate_size": 21504,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "time_step_min": 0.001,
        "layer_norm_epsilon": 1e-5,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    },
    read_model=_read_model,
    carried=("mtp.*",),
    model_tensors=model_table(f"{ROOT}embeddings.weight", f"{ROOT}norm_f.weight"),
)
