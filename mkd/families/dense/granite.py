"""Granite: Llama with four factors: of embeddings, attention scores, residual additions and logits.

Granite 4 without Mamba has the same layers under another model_type, and an MLP that may stand beside
experts. mkd runs it without experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mkd.errors import CheckpointError, UsageError
from mkd.families.family import FULL, Family, HFConfig, swiglu_layers
from mkd.families.layer_shape import LayerShape
from mkd.families.rope_config import read_rope
from mkd.families.weight_rules import LAYER, SEPARATE, Entry

KEYS = ("layer_types", "layers_block_type")  # both name the kinds of layers; the latter before transformers 5


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    bias = config["attention_bias"]
    return swiglu_layers(
        config,
        read_rope(config, head_dim),
        qkv_bias=bias,
        attention_output_bias=bias,
        mlp_bias=config["mlp_bias"],
        residual_scale=float(config["residual_multiplier"]),
    )


def _read_model(config: HFConfig) -> dict[str, Any]:
    return {
        "attention_scale": float(config["attention_multiplier"]),
        "embedding_scale": float(config["embedding_multiplier"]),
        "logits_divisor": float(config["logits_scaling"]),
    }


FACTORS = dict(
    attention_multiplier=1.0, embedding_multiplier=1.0, residual_multiplier=1.0, logits_scaling=1.0
)
DEFAULTS = FACTORS | {"attention_bias": False, "mlp_bias": False, "max_position_embeddings": 2048}
GRANITE = Family("granite", _read_layers, SEPARATE, defaults=DEFAULTS, read_model=_read_model)


def _read_hybrid(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    others = sorted(_kinds_of_layers(config) - {FULL})
    if others or config["num_local_experts"]:
        found = f"layers of kind {others[0]}" if others else f"{config['num_local_experts']} experts"
        what = f"a granitemoehybrid model with {found} is not supported"
        why = "mkd runs those of its models whose layers all have attention and one MLP"
        do = "use one of these, such as granite-4.0-micro"
        raise UsageError(what, why, do, code="model-feature-not-supported")
    layers = _read_layers({**config, "intermediate_size": config["shared_intermediate_size"]}, head_dim)
    if config.get("position_embedding_type") == "rope":
        return layers
    return tuple(replace(layer, rope=None) for layer in layers)


def _kinds_of_layers(config: HFConfig) -> set[str]:
    """Return the kinds of the layers. Raises `CheckpointError` if both keys are there and differ."""
    named = [
        [FULL if kind == "attention" else kind for kind in config[key]] for key in KEYS if config.get(key)
    ]
    if len(named) == 2 and named[0] != named[1]:
        what = f"{' and '.join(KEYS)} name different kinds of layers"
        why = "only one of them describes the weights"
        raise CheckpointError(what, why, "remove the wrong one", code="model-config-not-valid")
    return set(named[0] if named else ["mamba"])


def _hybrid_tensors() -> Mapping[str, Entry]:
    attention = {name: entry for name, entry in SEPARATE.items() if not name.startswith("mlp.")}
    up, down = SEPARATE["mlp.linear_fc1.weight"], SEPARATE["mlp.linear_fc2.weight"]
    mlp = f"{LAYER}shared_mlp."
    return MappingProxyType(
        attention
        | {
            "mlp.linear_fc1.weight": replace(up, tensors=(f"{mlp}input_linear.weight",) * 2),
            "mlp.linear_fc2.weight": replace(down, tensors=(f"{mlp}output_linear.weight",)),
        }
    )


GRANITE_HYBRID = Family(
    "granitemoehybrid",
    _read_hybrid,
    _hybrid_tensors(),
    defaults=DEFAULTS | {"num_local_experts": 8, "shared_intermediate_size": 1024},
    read_model=_read_model,
)
