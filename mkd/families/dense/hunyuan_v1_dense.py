"""Dense Hunyuan: norms of query and key heads behind the rotation, whose base may have a fixed factor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from mkd.families.family import Family, HFConfig, swiglu_layers
from mkd.families.layer_shape import LayerShape, RopeShape
from mkd.families.rope_config import read_rope
from mkd.families.weight_rules import HEAD, LAYER, SEPARATE, Entry


def _read_layers(config: HFConfig, head_dim: int) -> tuple[LayerShape, ...]:
    bias = config["attention_bias"]
    fields = dict(qkv_bias=bias, attention_output_bias=bias, qk_norm_turned=True)
    return swiglu_layers(config, _rope(config, head_dim), **fields)


def _rope(config: HFConfig, head_dim: int) -> RopeShape:
    """Read the rope. `dynamic` with `alpha` is a default rope of base theta alpha^(d / (d - 2))."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind != "dynamic" or not scaling.get("alpha"):
        return read_rope(config, head_dim)
    theta = {"rope_theta": scaling.get("rope_theta") or config.get("rope_theta") or 10000.0}
    rope = read_rope({"rope_parameters": theta}, head_dim)
    return replace(rope, theta=rope.theta * scaling["alpha"] ** (head_dim / (head_dim - 2)))


def _tensors() -> Mapping[str, Entry]:
    table = {}
    for name, entry in SEPARATE.items():
        if name == "self_attention.linear_proj.weight":
            for part in ("query", "key"):
                norm = f"{LAYER}self_attn.{part}_layernorm.weight"
                table[f"self_attention.turned_{part}_norm.weight"] = Entry(HEAD, (norm,))
        table[name] = entry
    return MappingProxyType(table)


HUNYUAN_V1_DENSE = Family(
    "hunyuan_v1_dense",
    _read_layers,
    _tensors(),
    defaults={"attention_bias": False, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
)
