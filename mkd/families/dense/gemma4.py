"""Gemma 4 text models: full attention has other heads than windows, and its keys are its values.

26B-A4B has experts beside the MLP of every layer. Releases have them behind towers for images and sound
(`gemma4`, see `mkd/families/vision.py`), which an export copies.

transformers never trains the number that multiplies a layer's output (`layer_scalar`), and neither does mkd.
It gives the embedding of `pad_token_id` no gradient from its inputs; mkd trains it like any other row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mkd.errors import CheckpointError, UsageError
from mkd.families.dense.gemma3 import GEMMA3
from mkd.families.experts.expert_shapes import softmax_experts
from mkd.families.family import FULL, SLIDING, Family, HFConfig, changed_by_kind, layer_kinds, with_windows
from mkd.families.layer_shape import HeadsShape, LayerShape, RopeShape
from mkd.families.rope_config import read_rope
from mkd.families.weight_rules import (
    EXPERT_DOWN,
    EXPERT_GATE_UP,
    HIDDEN,
    LAYER,
    ONE_NUMBER,
    ROUTER,
    ROUTER_BIAS,
    SHARED_DOWN,
    SHARED_GATE_UP,
    Entry,
    Stack,
)

THETA = {FULL: 1_000_000.0, SLIDING: 10_000.0}
UNSUPPORTED = (  # keys of config.json, and why mkd cannot follow a value other than null, 0 or false
    ("hidden_size_per_layer_input", "mkd has no embeddings for each layer, as E2B and E4B have"),
    ("num_kv_shared_layers", "every layer of mkd makes its own keys and values"),
    ("attention_bias", "Gemma 4 normalises the output of attention, which has no bias"),
)


CARRIED = tuple(f"model.{part}.*" for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio"))
INNER_NORMS = {
    "shared_input_norm.weight": "pre_feedforward_layernorm",
    "shared_output_norm.weight": "post_feedforward_layernorm_1",
    "expert_input_norm.weight": "pre_feedforward_layernorm_2",
    "expert_output_norm.weight": "post_feedforward_layernorm_2",
    "output_norm.weight": "post_feedforward_layernorm",
}


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    _refuse(config)
    kinds = _kinds(config)
    ropes = {kind: _rope(config, kind, head_dim) for kind in (SLIDING, FULL)}
    layer = LayerShape(
        config["intermediate_size"],
        ropes[SLIDING],
        "gelu_tanh",
        qk_norm=True,
        value_norm=True,
        post_norms=True,
        output_scale=True,
    )
    full = _full_heads(config, kinds)
    changes = dict(rope=_rope(config, FULL, full.head_dim), heads=full)
    changes["shared_key_value"] = config["attention_k_eq_v"]
    if config["enable_moe_block"]:
        experts = softmax_experts(
            config["num_experts"], config["top_k_experts"], config["moe_intermediate_size"]
        )
        width = config["intermediate_size"]
        layer = replace(layer, moe=replace(experts, shared_ffn_hidden_size=width, inner_norms=True))
    layers = changed_by_kind((layer,) * config["num_hidden_layers"], kinds, FULL, **changes)
    return with_windows(layers, config, kinds)


def _refuse(config: HFConfig) -> None:
    """Raise `UsageError` for what mkd cannot run exactly."""
    for name, why in UNSUPPORTED:
        if config[name]:
            what = f"{name} {config[name]!r} is not supported"
            raise UsageError(what, why, "use Gemma 4 31B or 26B-A4B", code="model-feature-not-supported")
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):  # of images alone
        what = f"use_bidirectional_attention {config['use_bidirectional_attention']!r} is not supported"
        why = "mkd's attention never looks at later tokens"
        raise UsageError(what, why, "use a causal model", code="model-feature-not-supported")
    if config["hidden_activation"] != "gelu_pytorch_tanh":
        what = f"hidden_activation {config['hidden_activation']!r} is not supported"
        why = "Gemma 4 has a gated MLP with the tanh form of GELU (gelu_pytorch_tanh)"
        raise UsageError(what, why, "use a model with it", code="model-feature-not-supported")


def _kinds(config: HFConfig) -> list[str]:
    """Return the kind of every layer. As in transformers, the last one has full attention."""
    number = config["num_hidden_layers"]
    kinds = config.get("layer_types") or [SLIDING if (i + 1) % 6 else FULL for i in range(number)]
    return layer_kinds(config, number, [*kinds[:-1], FULL])


def _full_heads(config: HFConfig, kinds: list[str]) -> HeadsShape:
    """Return the heads of full attention: from `per_layer_config`, or from the keys of older files.

    Raises `CheckpointError` for numbers that do not fit together, and `UsageError` if layers of a kind
    differ.
    """
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    found = {"head_dim": config["global_head_dim"], "num_key_value_heads": groups}
    if config["attention_k_eq_v"]:
        found["num_key_value_heads"] = config.get("num_global_key_value_heads") or groups
    by_layer = config.get("per_layer_config")
    if by_layer is not None:
        base = {"head_dim": config["head_dim"], "num_key_value_heads": groups}
        own = [base | dict(by_layer.get(str(index)) or {}) for index in range(len(kinds))]
        found = own[-1]
        expected = [found if kind == FULL else base for kind in kinds]
        if own != expected:
            what = "per_layer_config has other values than head_dim and num_key_value_heads of full attention"
            why = "mkd has two kinds of layers, windows and full attention"
            raise UsageError(what, why, "use a published Gemma 4", code="model-feature-not-supported")
    if heads % found["num_key_value_heads"]:
        what = (
            f"num_attention_heads {heads} is not a multiple of {found['num_key_value_heads']} key/value heads"
        )
        why = "each key/value head is shared by the same number of query heads"
        raise CheckpointError(what, why, "download or write it again", code="model-config-not-valid")
    return HeadsShape(heads, found["num_key_value_heads"], found["head_dim"])


def _rope(config: HFConfig, kind: str, head_dim: int) -> RopeShape:
    """Read the rope of one kind of layers."""
    default = {"rope_type": "proportional", "partial_rotary_factor": 0.25} if kind == FULL else {}
    given = (config.get("rope_parameters") or {}).get(kind)
    parameters = {"rope_theta": THETA[kind], **(default if given is None else given)}
    if parameters.get("rope_type", "default") == "default":
        return read_rope({"rope_parameters": parameters}, head_dim)
    if kind == SLIDING or parameters["rope_type"] != "proportional":
        what = f"rope type {parameters['rope_type']!r} of {kind} is not supported"
        why = "Gemma 4 has default position embeddings in windows, and proportional ones in full attention"
        raise UsageError(what, why, "use a model with these", code="model-feature-not-supported")
    plain = RopeShape(float(parameters["rope_theta"]), head_dim, "proportional")
    pairs = int(parameters.get("partial_rotary_factor", 1.0) * head_dim // 2)
    return replace(plain, factor=float(parameters.get("factor", 1.0)), turning_pairs=pairs)


def _read_model(config: HFConfig) -> dict[str, Any]:
    return {
        "embedding_scale": config["hidden_size"] ** 0.5,
        "attention_scale": 1.0,
        "logits_cap": config.get("final_logit_softcapping"),
    }


def _tensors() -> Mapping[str, Entry]:
    """Return the weight table: Gemma 3's, then experts, each of whose tensors has all experts of a layer."""
    dense = {
        name: replace(entry, needs="is_dense") if name.startswith(("mlp.", "pre_mlp")) else entry
        for name, entry in GEMMA3.tensors.items()
        if not name.endswith(".bias")
    }
    gate_up, down = (
        (f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up")),
        f"{LAYER}mlp.down_proj.weight",
    )
    of_shared = {
        "mlp.shared_experts.linear_fc1.weight": Entry(SHARED_GATE_UP, tuple(gate_up), "has_inner_norms"),
        "mlp.shared_experts.linear_fc2.weight": Entry(SHARED_DOWN, (down,), "has_inner_norms"),
    }
    router, experts, expert = f"{LAYER}router.", f"{LAYER}experts.", "mlp.experts.local_experts.{expert}."
    routed = {
        "mlp.router.weight": Entry(ROUTER, (f"{router}proj.weight",), "has_inner_norms"),
        "mlp.router.input_scale": Entry(HIDDEN, (f"{router}scale",), "has_inner_norms"),
        "mlp.router.expert_scale": Entry(ROUTER_BIAS, (f"{router}per_expert_scale",), "has_inner_norms"),
        f"{expert}linear_fc1.weight": Entry(
            EXPERT_GATE_UP, (f"{experts}gate_up_proj",) * 2, "has_inner_norms", Stack()
        ),
        f"{expert}linear_fc2.weight": Entry(
            EXPERT_DOWN, (f"{experts}down_proj",), "has_inner_norms", Stack()
        ),
    }
    norms = {
        f"mlp.{ours}": Entry(HIDDEN, (f"{LAYER}{theirs}.weight",), "has_inner_norms")
        for ours, theirs in INNER_NORMS.items()
    }
    scale = {"output_scale": Entry(ONE_NUMBER, (f"{LAYER}layer_scalar",), "output_scale")}
    return MappingProxyType(dense | of_shared | routed | norms | scale)


GEMMA4 = Family(
    "gemma4_text",
    _read_layers,
    _tensors(),
    defaults={
        "attention_bias": False,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 256,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "num_kv_shared_layers": 0,
        "sliding_window": 512,
        "tie_word_embeddings": True,
    },
    read_model=_read_model,
    carried=CARRIED,
)
