"""Layers of Qwen3-Next and Qwen3.5: gated delta nets in three of four layers, gated attention in the rest.

transformers keeps `mtp.*` and the tower of a model with images out of these models. mkd does not train them
either: an export copies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mkd.errors import CheckpointError, UsageError
from mkd.families.family import HFConfig, swiglu_layers
from mkd.families.hybrid.mixer_rules import CONVOLUTION, OF_HEADS, OUTPUT, by_block, mixer_of
from mkd.families.layer_shape import LayerShape, MoEShape
from mkd.families.mixer_shape import DeltaShape
from mkd.families.rope_config import read_rope
from mkd.families.weight_rules import LAYER, SEPARATE, SHARED_DOWN, SHARED_GATE_UP, Entry, Rule, with_experts

MIXER, ATTENTION = "linear_attention", "full_attention"
CARRIED = "mtp.*", "model.visual.*"
DEFAULTS = MappingProxyType(
    {
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }
)


def delta_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    """Return the layers with their mixer or attention, without experts. Raises as `swiglu_layers`."""
    if config.get("attention_bias"):
        what, why = "attention_bias true is not supported", "the attention of released models has no biases"
        raise UsageError(what, why, "use a model without it", code="model-feature-not-supported")
    attention = dict(qk_norm=True, output_gate=True)
    layers = swiglu_layers(config, read_rope(config, head_dim, is_partial=True), **attention)
    mixer = _read_mixer(config)
    kinds = _kinds(config, len(layers))
    return tuple(
        replace(layer, mixer=mixer, qk_norm=False, output_gate=False) if kind == MIXER else layer
        for layer, kind in zip(layers, kinds, strict=True)
    )


def _read_mixer(config: HFConfig) -> DeltaShape:
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if values % keys:
        what = f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}"
        why = "each key head is shared by the same number of value heads"
        raise CheckpointError(what, why, "download config.json again", code="model-config-not-valid")
    sizes = (config[f"linear_{name}"] for name in ("key_head_dim", "value_head_dim", "conv_kernel_dim"))
    return DeltaShape(keys, values, *sizes)


def _kinds(config: HFConfig, num_layers: int) -> list[str]:
    """Return the kind of every layer, named or by the interval of attention."""
    every = config["full_attention_interval"]
    kinds = config.get("layer_types") or [
        MIXER if layer % every else ATTENTION for layer in range(1, num_layers + 1)
    ]
    for kind in kinds:
        if kind not in (MIXER, ATTENTION):
            what, why = f"layer type {kind!r} is not supported", f"mkd knows {ATTENTION} and {MIXER} here"
            raise UsageError(what, why, "use a model with these alone", code="model-feature-not-supported")
    if len(kinds) != num_layers:
        what = f"layer_types names {len(kinds)} layers, num_hidden_layers is {num_layers}"
        why = "each layer must have its kind"
        raise CheckpointError(what, why, "download it or write it again", code="model-config-not-valid")
    return list(kinds)


FUSED_PROJECTION = by_block(
    lambda mixer: (sum(mixer.projected_parts[:4]), sum(mixer.projected_parts[4:]))
)  # of each block q, k, v, z in one tensor, b and a in another
_HEAD_NORM = Rule(
    lambda m, layer, ranks: 1,
    lambda m, layer, ranks: (mixer_of(layer).value_dim,),
    other_dims=lambda m, layer: (),
    replicated=True,
)
GATED_QKV = Rule(  # of each query head its query, then its gate
    lambda m, layer, ranks: m.num_query_groups,
    lambda m, layer, ranks: (2 * m.heads_per_group * m.head_dim, m.head_dim, m.head_dim),
)
_SHARED_GATE = Rule(lambda m, layer, ranks: 1, lambda m, layer, ranks: (1,), replicated=True)


def delta_table(projection: Rule, projected: tuple[str, ...]) -> Mapping[str, Entry]:
    """Return the weight table of layers with mixers or gated attention and a dense MLP.

    `projected` names the tensors of the mixer's input projection, whose `Rule` is `projection`.
    """
    theirs = f"{LAYER}linear_attn."
    rows = (
        ("in_proj.weight", projection, tuple(f"{name}.weight" for name in projected)),
        ("conv_weight", CONVOLUTION, ("conv1d.weight",) * 3),
        ("A_log", OF_HEADS, ("A_log",)),
        ("dt_bias", OF_HEADS, ("dt_bias",)),
        ("norm_weight", _HEAD_NORM, ("norm.weight",)),
        ("out_proj.weight", OUTPUT, ("out_proj.weight",)),
    )
    mixer = {
        f"self_attention.{ours}": Entry(rule, tuple(theirs + name for name in names), "mixer")
        for ours, rule, names in rows
    }
    table: dict[str, Entry] = {}
    for name, entry in SEPARATE.items():
        if name == "pre_mlp_layernorm.weight":
            table |= mixer
        table[name] = (
            entry if entry.needs or "attention" not in name else replace(entry, needs="has_attention")
        )
    qkv = table["self_attention.linear_qkv.weight"]
    return MappingProxyType(table | {"self_attention.linear_qkv.weight": replace(qkv, rule=GATED_QKV)})


def with_shared_experts(table: Mapping[str, Entry]) -> Mapping[str, Entry]:
    """Return `table` for layers with experts, each tensor one expert, and a gated MLP beside them."""
    expert, shared = "mlp.experts.{expert}.", f"{LAYER}mlp.shared_expert."
    gate_up = (f"{shared}gate_proj.weight", f"{shared}up_proj.weight")
    own = "mlp.shared_experts."
    return MappingProxyType(
        dict(
            with_experts(
                table,
                (f"{expert}gate_proj.weight", f"{expert}up_proj.weight"),
                f"{expert}down_proj.weight",
                "mlp.gate.weight",
            )
        )
        | {
            f"{own}linear_fc1.weight": Entry(SHARED_GATE_UP, gate_up, "has_shared_experts"),
            f"{own}linear_fc2.weight": Entry(
                SHARED_DOWN, (f"{shared}down_proj.weight",), "has_shared_experts"
            ),
            f"{own}gate_weight": Entry(
                _SHARED_GATE, (f"{LAYER}mlp.shared_expert_gate.weight",), "has_shared_gate"
            ),
        }
    )


def gated_experts(experts: MoEShape, config: HFConfig) -> MoEShape:
    """Return `experts` with the gated MLP that every token passes beside them."""
    return replace(
        experts, shared_ffn_hidden_size=config["shared_expert_intermediate_size"], shared_gate=True
    )


def read_zero_centered(config: HFConfig) -> dict[str, Any]:
    """Return the fields of `ModelShape` that these models share: all norms but the mixer's are 1 + w."""
    return {"zero_centered_norms": True}
