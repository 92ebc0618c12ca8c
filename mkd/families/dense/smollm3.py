"""SmolLM3: Llama in which every fourth layer does not see positions."""

from __future__ import annotations

from dataclasses import replace

from mkd.errors import CheckpointError, UsageError
from mkd.families.family import FULL, SLIDING, Family, HFConfig, swiglu_layers, with_windows
from mkd.families.layer_shape import LayerShape
from mkd.families.rope_config import read_rope
from mkd.families.weight_rules import SEPARATE


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    bias = config["attention_bias"]
    biases = dict(qkv_bias=bias, attention_output_bias=bias, mlp_bias=config["mlp_bias"])
    layers = swiglu_layers(config, read_rope(config, head_dim), **biases)
    rotates = _rotates(config, len(layers))
    layers = tuple(
        layer if does else replace(layer, rope=None) for layer, does in zip(layers, rotates, strict=True)
    )
    kinds = config.get("layer_types") or [FULL if does else SLIDING for does in rotates]
    if config["use_sliding_window"] and config.get("sliding_window"):
        return with_windows(layers, config, kinds)
    if SLIDING in config.get("layer_types", ()):
        what = "layer_types has sliding_attention, and use_sliding_window is false"
        why = "transformers has no one answer to whether these layers have a window"
        do = "set use_sliding_window to true, or layer_types to full_attention alone"
        raise UsageError(what, why, do, code="model-feature-not-supported")
    return layers


def _rotates(config: HFConfig, num_layers: int) -> list[bool]:
    """Return for every layer whether queries and keys are turned: 1 in `no_rope_layers`, despite its name."""
    every = config["no_rope_layer_interval"]
    given = config.get("no_rope_layers") or [(index + 1) % every for index in range(num_layers)]
    if len(given) < num_layers:
        what = f"no_rope_layers has {len(given)} numbers, num_hidden_layers is {num_layers}"
        why = "each layer must say whether it has a position embedding"
        raise CheckpointError(what, why, "download or write it again", code="model-config-not-valid")
    return [bool(one) for one in given[:num_layers]]


SMOLLM3 = Family(
    "smollm3",
    _read_layers,
    SEPARATE,
    defaults={
        "attention_bias": False,
        "max_position_embeddings": 32768,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
)
