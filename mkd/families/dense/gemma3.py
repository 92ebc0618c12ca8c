"""Gemma 3 text models: a window and another rope in five of six layers, norms around every block.

Tried on CPU ranks against transformers (logits, gradients). Transformer Engine's layers get the same switches
(zero-centred norms, post norms, a window and a rope for each layer, the scale of attention). They have not
run on a GPU yet. transformers gives the embedding of `pad_token_id` no gradient from its inputs; mkd trains
it like any other row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mkd.errors import UsageError
from mkd.families.family import FULL, SLIDING, Family, HFConfig, kinds_by_pattern, layer_kinds, with_windows
from mkd.families.layer_shape import LayerShape, RopeShape
from mkd.families.rope_config import read_layer_rope
from mkd.families.weight_rules import HIDDEN, LAYER, SEPARATE, Entry, with_post_norms

GLOBAL, LOCAL = FULL, SLIDING
THETA = {GLOBAL: 1_000_000.0, LOCAL: 10_000.0}
THETA_KEY = {GLOBAL: "rope_theta", LOCAL: "rope_local_base_freq"}  # the keys of older configurations
UNSUPPORTED = (  # switches that no released Gemma 3 has set
    ("final_logit_softcapping", "mkd reads soft caps of logits for Gemma 4 alone"),
    ("attn_logit_softcapping", "mkd's attention has no soft-cap"),
    ("use_bidirectional_attention", "mkd's attention never looks at later tokens"),
    ("attention_bias", "Gemma 3 normalises the output of attention, which has no bias"),
)


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    for name, why in UNSUPPORTED:
        if config.get(name):
            what = f"{name} {config[name]!r} is not supported"
            raise UsageError(what, why, "use a model without it", code="model-feature-not-supported")
    if config["hidden_activation"] != "gelu_pytorch_tanh":
        what = f"hidden_activation {config['hidden_activation']!r} is not supported"
        why = "Gemma 3 has a gated MLP with the tanh form of GELU (gelu_pytorch_tanh)"
        raise UsageError(what, why, "use a model with it", code="model-feature-not-supported")
    kinds = layer_kinds(config, config["num_hidden_layers"], kinds_by_pattern(config))
    global_rope, local_rope = _rope(config, head_dim, GLOBAL), _rope(config, head_dim, LOCAL)
    width = config["intermediate_size"]
    common = LayerShape(width, global_rope, "gelu_tanh", qk_norm=True, post_norms=True)
    ropes = [local_rope if kind == LOCAL else global_rope for kind in kinds]
    return with_windows([replace(common, rope=rope) for rope in ropes], config, kinds)


def _rope(config: HFConfig, head_dim: int, kind: str) -> RopeShape:
    """Read the rope of one kind of layers."""
    rope = read_layer_rope(config, head_dim, kind, config.get(THETA_KEY[kind], THETA[kind]))
    if rope.kind not in ("default", "linear"):
        what = f"rope type {rope.kind!r} is not supported"
        why = "Gemma 3 has default and linear position embeddings"
        raise UsageError(what, why, "use a model with one of these", code="model-feature-not-supported")
    return rope


def _read_model(config: HFConfig) -> dict[str, Any]:
    return {
        "zero_centered_norms": True,
        "embedding_scale": config["hidden_size"] ** 0.5,
        "attention_scale": config["query_pre_attn_scalar"] ** -0.5,
    }


def _tensors() -> Mapping[str, Entry]:
    """Return the weight table, with two more norms than llama's.

    The norm before the MLP is the one that llama calls post-attention norm.
    """
    before = {"input_layernorm.weight": SEPARATE["input_layernorm.weight"]}
    pre = Entry(HIDDEN, (f"{LAYER}pre_feedforward_layernorm.weight",))
    return MappingProxyType(before | with_post_norms(SEPARATE) | {"pre_mlp_layernorm.weight": pre})


GEMMA3 = Family(
    "gemma3_text",
    _read_layers,
    _tensors(),
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    read_model=_read_model,
)
