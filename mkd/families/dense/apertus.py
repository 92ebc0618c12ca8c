"""Apertus: MLPs without gates, whose activation, xIELU, has two learned numbers in each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from mkd.errors import UsageError
from mkd.families.family import Family, HFConfig
from mkd.families.layer_shape import LayerShape
from mkd.families.rope_config import read_rope
from mkd.families.weight_rules import LAYER, ONE_NUMBER, Entry, layer_table

NORMS = {"input_layernorm.weight": "attention_layernorm", "pre_mlp_layernorm.weight": "feedforward_layernorm"}


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    if config["hidden_act"] != "xielu":
        what = f"hidden_act {config['hidden_act']!r} is not supported"
        why = "the MLPs of released Apertus models have xIELU"
        raise UsageError(what, why, "use a model with it", code="model-feature-not-supported")
    rope, bias = read_rope(config, head_dim), config["attention_bias"]
    layer = LayerShape(config["intermediate_size"], rope, "xielu", is_gated=False, qk_norm=True)
    layer = replace(layer, qkv_bias=bias, attention_output_bias=bias)
    return (layer,) * config["num_hidden_layers"]


def _tensors() -> Mapping[str, Entry]:
    attention, mlp = f"{LAYER}self_attn.", f"{LAYER}mlp."
    table = layer_table(tuple(f"{attention}{part}_proj" for part in "qkv"), (f"{mlp}up_proj",))
    for ours, theirs in NORMS.items():
        table[ours] = replace(table[ours], tensors=(f"{LAYER}{theirs}.weight",))
    numbers = ("alpha_p", "alpha_n", "beta", "eps")
    activation = {
        f"mlp.activation_func.{name}": Entry(ONE_NUMBER, (f"{mlp}act_fn.{name}",)) for name in numbers
    }
    return MappingProxyType(table | activation)


APERTUS = Family(
    "apertus",
    _read_layers,
    _tensors(),
    defaults={
        "attention_bias": False,
        "hidden_act": "xielu",
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 12_000_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rope_theta": 12_000_000.0,
    },
)
