"""Kinds of values in a Hugging Face `config.json`.

A value of the wrong kind is a named error at once, never a crash later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mkd.errors import CheckpointError

SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
OPTIONAL_SIZES = (
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "sliding_window",
    "sliding_window_pattern",
)
NUMBERS = (
    "rms_norm_eps",
    "initializer_range",
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "query_pre_attn_scalar",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
)
SWITCHES = (
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "use_sliding_window",
    "is_causal",
    "use_bidirectional_attention",
)
TEXTS = ("model_type", "hidden_act", "hidden_activation", "rope_type", "type")
ROPES = ("rope_parameters", "rope_scaling")
ROPE_OBJECTS = (*ROPES, "full_attention", "sliding_attention")  # the last two: a rope for each layer type


@dataclass(frozen=True)
class Kind:
    """The values that a key of config.json may have."""

    must_be: str
    holds: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(holds, value))


KINDS = {  # every key that is read, in config.json itself or in its rope parameters
    **dict.fromkeys(
        (*SIZES, *OPTIONAL_SIZES), Kind("a whole number above 0", lambda v: type(v) is int and v > 0)
    ),
    **dict.fromkeys(NUMBERS, Kind("a finite number above 0", _is_number)),
    **dict.fromkeys(SWITCHES, Kind("true or false", lambda v: isinstance(v, bool))),
    **dict.fromkeys(
        ("short_factor", "long_factor"), Kind("a list of finite numbers above 0", _list_of(_is_number))
    ),
    **dict.fromkeys(TEXTS, Kind("a text", _is_text)),
    **dict.fromkeys(ROPE_OBJECTS, Kind("an object", lambda v: isinstance(v, Mapping))),
    "layer_types": Kind("a list of texts", _list_of(_is_text)),
    "max_window_layers": Kind("a whole number of 0 or more", lambda v: type(v) is int and v >= 0),
}


def without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy without the keys that are null, nested objects included."""
    given = {key: value for key, value in config.items() if value is not None}
    return {
        key: without_nulls(value) if isinstance(value, Mapping) else value for key, value in given.items()
    }


def check_kinds(config: Mapping[str, Any], source: str) -> None:
    """Raise `CheckpointError` for a value of another kind than its key requires. `source` names the file."""
    for name, value in config.items():
        kind = KINDS.get(name)
        if kind is not None and not kind.holds(value):
            what = f"{source}: {name} is {value!r}"
            do = "download or write it again"
            raise CheckpointError(what, f"it must be {kind.must_be}", do, code="model-config-value-not-valid")
        if name in ROPE_OBJECTS:
            check_kinds(value, f"{source}: {name}")
