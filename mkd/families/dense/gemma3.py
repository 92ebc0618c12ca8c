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
from mkd.families.family import FULL, SLIDING, Family, HFConfig, layer_kinds, with_windows
from mkd.families.layer_shape import LayerShape, RopeShape
from mkd.families.rope_config import read_rope
from mkd.families.weight_rules import HIDDEN, LAYER, SEPARATE, Entry

GLOBAL, LOCAL = FULL, SLIDING
THETA = {GLOBAL: 1_000_000.0, LOCAL: 10_000.0}
THETA_KEY = {GLOBAL: "rope_theta", LOCAL: "rope_local_base_freq"}  # the keys of older configurations
UNSUPPORTED = (  # switches that no released Gemma 3 has set
    ("final_logit_softcapping", "mkd's losses read logits as the head makes them"),
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
    every = config["sliding_window_pattern"]
    layers = range(1, config["num_hidden_layers"] + 1)
    kinds = config.get("layer_types") or [LOCAL if layer % every else GLOBAL for layer in layers]
    global_rope, local_rope = _rope(config, head_dim, GLOBAL), _rope(config, head_dim, LOCAL)
    width = config["intermediate_size"]
    common = LayerShape(width, global_rope, "gelu_tanh", qk_norm=True, post_norms=True)
    named = layer_kinds(config, len(layers), kinds)
    ropes = [local_rope if kind == LOCAL else global_rope for kind in named]
    return with_windows([replace(common, rope=rope) for rope in ropes], config, named)


def _rope(config: HFConfig, head_dim: int, kind: str) -> RopeShape:
    """Read the rope of one kind of layers.

    It is in `rope_parameters` by kind (transformers 5), or in keys of the configuration. `rope_scaling`
    belongs to the global layers; transformers merges it into `rope_parameters`.
    """
    parameters = dict((config.get("rope_parameters") or {}).get(kind) or {})
    if kind == GLOBAL:
        parameters |= config.get("rope_scaling") or {}
    parameters.setdefault("rope_theta", config.get(THETA_KEY[kind], THETA[kind]))
    rope = read_rope({"rope_parameters": parameters}, head_dim)
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
    table = {}
    for name, entry in SEPARATE.items():
        table[name] = entry
        if name == "self_attention.linear_proj.bias":
            post = Entry(HIDDEN, (f"{LAYER}post_attention_layernorm.weight",))
            table["self_attention.linear_proj.post_layernorm.weight"] = post
    table["pre_mlp_layernorm.weight"] = Entry(HIDDEN, (f"{LAYER}pre_feedforward_layernorm.weight",))
    post = Entry(HIDDEN, (f"{LAYER}post_feedforward_layernorm.weight",))
    return MappingProxyType(table | {"mlp.linear_fc2.post_layernorm.weight": post})


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
