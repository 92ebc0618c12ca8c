"""`Family`: what mkd must know about a Hugging Face `model_type`, and readers that families share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mkd.errors import CheckpointError, UsageError
from mkd.families.layer_shape import LayerShape, RopeShape
from mkd.families.weight_rules import MODEL_TABLE, Entry

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers in config.json
HFConfig = Mapping[str, Any]
"""The content of config.json without its nulls, completed by the family's defaults.

The kinds of values have been checked.
"""


@dataclass(frozen=True)
class Family:
    """One `model_type`. Readers may raise `KeyError` (a missing key) or an `MkdError`."""

    model_type: str
    read_layers: Callable[[HFConfig, int], tuple[LayerShape, ...]]  # (configuration, head_dim)
    tensors: Mapping[str, Entry]  # weight table of one decoder layer, see weight_rules.py
    # The values that transformers assumes for missing keys of config.json.
    defaults: HFConfig = field(default_factory=dict)
    read_model: Callable[[HFConfig], dict[str, Any]] = lambda config: {}  # further fields of `ModelShape`
    # Names, with * for any text, of tensors that mkd neither runs nor trains. An export copies them.
    carried: tuple[str, ...] = ()
    # True if files may hold all experts of a layer in two tensors: `mlp.experts.gate_up_proj` [E, 2f, h]
    # and `mlp.experts.down_proj` [E, h, f]. An export has tensors for each expert, as `tensors` says.
    reads_stacked_experts: bool = False
    # True if these tensors may have each matrix as [out, in] in place of [in, out], which an export has.
    reads_turned_stacks: bool = False
    model_tensors: Mapping[str, Entry] = field(default_factory=lambda: MODEL_TABLE)  # outside the layers


def swiglu_layers(config: HFConfig, rope: RopeShape, **fields: Any) -> tuple[LayerShape, ...]:
    """Return the model's equal layers, with further `fields`. Raise `UsageError` unless the MLP is SwiGLU."""
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        what = f"hidden_act {config['hidden_act']!r} is not supported"
        do = "use a model of this family with it"
        raise UsageError(what, "this family's MLP is SwiGLU (silu)", do, code="model-feature-not-supported")
    layer = LayerShape(config["intermediate_size"], rope, **fields)
    return (layer,) * config["num_hidden_layers"]


def joint_norm_channels(config: HFConfig, head_dim: int) -> tuple[int, int]:
    """Return the channels of all query heads, and of all key heads, for `LayerShape.joint_qk_norm`."""
    heads = config["num_attention_heads"]
    return heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim


def layer_kinds(config: HFConfig, num_layers: int, kinds: Sequence[str] | None) -> list[str]:
    """Return the kind of attention of every layer; `sliding_attention` for all if `kinds` is None or empty.

    Raises `UsageError` for another kind of attention. Raises `CheckpointError` if a mixture does not name
    every layer, or if a kind needs a missing window.
    """
    named = list(kinds or [SLIDING] * num_layers)
    for kind in named:
        if kind not in (SLIDING, FULL):
            what = f"layer type {kind!r} is not supported"
            why = f"mkd knows {FULL} and {SLIDING}"
            raise UsageError(what, why, "use a model with these alone", code="model-feature-not-supported")
    if len(set(named)) == 1:  # some configurations with fewer layers than their model keep the whole list
        named = named[:1] * num_layers
    if len(named) != num_layers:
        what = f"layer_types names {len(named)} layers, num_hidden_layers is {num_layers}"
        why = "each layer must have its kind of attention"
        raise CheckpointError(what, why, "download or write it again", code="model-config-not-valid")
    if config.get("sliding_window") is None and kinds and SLIDING in named:
        what = "sliding_window is missing or null, and layers have sliding_attention"
        why = "transformers cannot run these layers without the size of their window"
        raise CheckpointError(what, why, "download or write it again", code="model-config-not-valid")
    return named


def kinds_by_pattern(config: HFConfig) -> list[str]:
    """Return `layer_types`, or by `sliding_window_pattern` n: every n-th layer has full attention.

    Raises `CheckpointError` for another pattern without `layer_types`, which transformers cannot read.
    """
    given, every = config.get("layer_types"), config.get("sliding_window_pattern")
    if given:
        return list(given)
    if not isinstance(every, int) or every == 0:
        what = f"sliding_window_pattern is {every!r}, and layer_types is missing"
        do = "download config.json again, or write layer_types"
        raise CheckpointError(
            what, "each layer must have its kind of attention", do, code="model-config-not-valid"
        )
    return [FULL if (index + 1) % every == 0 else SLIDING for index in range(config["num_hidden_layers"])]


def changed_by_kind(
    layers: Sequence[LayerShape], kinds: Sequence[str], kind: str, **changes: Any
) -> tuple[LayerShape, ...]:
    """Return the layers with `changes` of their fields where the kind in `kinds`, one a layer, is `kind`."""
    return tuple(
        replace(layer, **changes) if own == kind else layer for layer, own in zip(layers, kinds, strict=True)
    )


def with_windows(
    layers: Sequence[LayerShape], config: HFConfig, kinds: Sequence[str] | None
) -> tuple[LayerShape, ...]:
    """Give `sliding_window` to the layers whose kind is `sliding_attention`; see `layer_kinds`.

    A window as long as the model's context is none: it hides nothing, and attention with windows is slower.
    """
    window, named = config.get("sliding_window"), layer_kinds(config, len(layers), kinds)
    if window is not None and window >= config.get("max_position_embeddings", math.inf):
        window = None
    return changed_by_kind(layers, named, SLIDING, sliding_window=window)


def with_switched_windows(layers: Sequence[LayerShape], config: HFConfig) -> tuple[LayerShape, ...]:
    """Give windows behind a switch as Qwen does: to named kinds, or from layer `max_window_layers` on."""
    is_switched_on = config.get("use_sliding_window", False)
    if not is_switched_on or not (config.get("sliding_window") or config.get("layer_types")):
        return tuple(layers)
    first = config.get("max_window_layers", 28)
    by_index = [SLIDING if layer >= first else FULL for layer in range(len(layers))]
    return with_windows(layers, config, config.get("layer_types") or by_index)
