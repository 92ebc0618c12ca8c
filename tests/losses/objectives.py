"""Objectives and chunk settings from plain keywords.

A divergence is given by its name, its parameter by the name of its YAML key.
"""

from __future__ import annotations

from typing import Any

from mkd.config.divergence import DECLARATIONS, PARAMETERS
from mkd.losses import KDObjective, build_divergence
from mkd.losses.divergence_base import Divergence
from mkd.xtoken.loss_settings import ChunkLossSettings

MIXED = dict(jsd_beta=0.3, mixed_kl_weight=0.7, skew_alpha=0.2)
"""A value for every parameter, none of them at an end of its range or at its default."""


def divergence_of(name: str = "forward_kl", **parameters: float) -> Divergence:
    """Return the divergence; parameters of other ones are ignored."""
    declared = DECLARATIONS[name].parameter
    return build_divergence(name, None if declared is None else parameters.get(declared.name))


def objective_of(**settings: Any) -> KDObjective:
    return KDObjective(**_with_divergence(settings))


def chunk_settings_of(**settings: Any) -> ChunkLossSettings:
    return ChunkLossSettings(**_with_divergence(settings))


def _with_divergence(settings: dict[str, Any]) -> dict[str, Any]:
    names = {parameter.name for parameter in PARAMETERS}
    parameters = {name: value for name, value in settings.items() if name in names}
    others = {name: value for name, value in settings.items() if name not in names | {"divergence"}}
    return others | {"divergence": divergence_of(settings.get("divergence", "forward_kl"), **parameters)}
