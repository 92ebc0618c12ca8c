"""Rotary position embeddings as Hugging Face configurations spell them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mkd.errors import CheckpointError, UsageError
from mkd.families.layer_shape import RopeShape


def read_rope(config: Mapping[str, Any], head_dim: int, is_partial: bool = False) -> RopeShape:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (older versions).

    If both are given, the older keys take precedence. `is_partial`: the family's models follow
    `partial_rotary_factor`; other families ignore it.
    """
    scaling = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    kind = {"su": "longrope"}.get(kind, kind)
    fraction = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    fraction = float(fraction or 1.0) if is_partial else 1.0
    base = RopeShape(theta=theta, rotary_dim=int(head_dim * fraction), kind=kind)
    if kind == "default":
        return base
    if kind == "linear":
        return replace(base, factor=float(scaling["factor"]))
    if kind == "llama3":
        return replace(
            base,
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_max_position_embeddings=original_positions(config, scaling),
        )
    if kind == "yarn":
        return _yarn(config, scaling, base)
    if kind == "longrope":
        return _long_rope(config, scaling, base)
    why = "mkd reproduces default, linear, llama3, yarn and longrope position embeddings exactly"
    do = "use a model with one of these, or remove the rope scaling for sequences below its original length"
    raise UsageError(f"rope type {kind!r} is not supported", why, do, code="model-feature-not-supported")


def read_layer_rope(config: Mapping[str, Any], head_dim: int, kind: str, theta: float) -> RopeShape:
    """Read the rope of one kind of layers (`full_attention`, `sliding_attention`).

    It is in `rope_parameters` by kind (transformers 5), or in keys of the configuration; `theta` is the base
    if the former has none. `rope_scaling` belongs to the full layers; transformers merges it into
    `rope_parameters`.
    """
    parameters = dict((config.get("rope_parameters") or {}).get(kind) or {})
    if kind == "full_attention":
        parameters |= config.get("rope_scaling") or {}
    parameters.setdefault("rope_theta", theta)
    limit = {name: config[name] for name in ("max_position_embeddings",) if name in config}
    return read_rope({"rope_parameters": parameters} | limit, head_dim)


def original_positions(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> int:
    """Return the context length before scaling. As in transformers, the model's key comes first."""
    name = "original_max_position_embeddings"
    return config.get(name) or scaling.get(name) or config["max_position_embeddings"]


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor of attention for contexts `factor` times longer (section 3.4 of the paper)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(config: Mapping[str, Any], scaling: Mapping[str, Any], base: RopeShape) -> RopeShape:
    """Read YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071), with DeepSeek's two `mscale`."""
    original = original_positions(config, scaling)
    factor = float(scaling.get("factor") or config["max_position_embeddings"] / original)
    attention_factor = scaling.get("attention_factor")
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if attention_factor is None and mscale and mscale_all_dim:
        attention_factor = yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all_dim)
    return replace(
        base,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=yarn_scale(factor) if attention_factor is None else float(attention_factor),
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        truncate=scaling.get("truncate", True),
    )


def _long_rope(config: Mapping[str, Any], scaling: Mapping[str, Any], base: RopeShape) -> RopeShape:
    """Read LongRoPE as Phi-3 spells it (Ding et al. 2024, https://arxiv.org/abs/2402.13753)."""
    for name in ("short_factor", "long_factor"):
        if len(scaling[name]) != base.rotary_dim // 2:
            what = f"the rope parameters have {len(scaling[name])} numbers of {name}"
            why = f"each belongs to two of the {base.rotary_dim} channels of a head that are rotated"
            do = "download config.json or write it again"
            raise CheckpointError(what, why, do, code="model-config-not-valid")
    original = original_positions(config, scaling)
    factor = float(scaling.get("factor") or config["max_position_embeddings"] / original)
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    return replace(
        base,
        factor=factor,
        original_max_position_embeddings=original,
        short_factor=tuple(float(x) for x in scaling["short_factor"]),
        long_factor=tuple(float(x) for x in scaling["long_factor"]),
        attention_factor=float(attention_factor),
    )
