"""Experts as several families have them: their shapes, and the tensors that hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

from mkd.errors import CheckpointError, UsageError
from mkd.families.family import HFConfig
from mkd.families.layer_shape import MoEShape
from mkd.families.weight_rules import LAYER, ROUTER_BIAS, SHARED_DOWN, SHARED_GATE_UP, Entry, with_experts

# Keys of config.json that choose how tokens are routed. transformers ignores those of the first releases.
_ROUTING: Mapping[str, bool | int | str] = MappingProxyType(
    {"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
)


def softmax_experts(
    num_experts: int, top_k: int, ffn_hidden_size: int, normalizes_top_k: bool = True, biases: bool = False
) -> MoEShape:
    """Return experts that are chosen by a softmax of the router's logits.

    Raises `CheckpointError` if a token has more experts than there are, and `UsageError` for a single
    expert whose weight is always 1.
    """
    require_top_k(num_experts, top_k)
    if top_k == 1 and normalizes_top_k:
        what = "num_experts_per_tok 1 with normalised weights is not supported"
        why = "the only expert of a token always has the weight 1, so the router would have no gradient"
        raise UsageError(
            what, why, "use a model with more experts a token", code="model-feature-not-supported"
        )
    return MoEShape(num_experts, top_k, ffn_hidden_size, normalizes_top_k=normalizes_top_k, biases=biases)


def sigmoid_experts(config: HFConfig) -> MoEShape:
    """Return experts as DeepSeek-V3 has them, which are chosen by sigmoids of the router's logits and a bias.

    Raises `CheckpointError` for numbers that do not fit together, and `UsageError` for another routing.
    """
    num_experts, top_k, width = (
        config[name] for name in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    )
    groups, top_groups = config["n_group"], config["topk_group"]
    require_top_k(num_experts, top_k)
    require_groups(num_experts, top_k, groups, top_groups)
    for name, supported in _ROUTING.items():
        if config.get(name, supported) != supported:
            what = f"{name} {_written(config[name])} is not supported"
            why = f"mkd routes as DeepSeek-V3 does, with {name} {_written(supported)}"
            raise UsageError(what, why, "use a model that routes so", code="model-feature-not-supported")
    if top_groups < groups and top_k // top_groups != 2:
        what = f"{top_k} experts in {top_groups} of {groups} groups are not supported"
        why = "groups are chosen by the sum of 2 scores, which must be the number of experts of a group"
        raise UsageError(what, why, "use a model with 2 for each group", code="model-feature-not-supported")
    return MoEShape(
        num_experts,
        top_k,
        width,
        scores="sigmoid",
        scaling_factor=float(config["routed_scaling_factor"]),
        num_groups=groups,
        top_groups=top_groups,
        shared_ffn_hidden_size=config["n_shared_experts"] * width,
        correction_bias=True,
    )


def _written(value: object) -> str:
    """Return a value of config.json as JSON writes it."""
    return json.dumps(value).strip('"')


def require_top_k(num_experts: int, top_k: int) -> None:
    """Raise `CheckpointError` if a token has more experts than there are."""
    if top_k > num_experts:
        what = f"num_experts_per_tok {top_k} is above the number of experts, {num_experts}"
        why = "each token goes to as many different experts"
        raise CheckpointError(what, why, "download it again", code="model-config-not-valid")


def require_groups(num_experts: int, top_k: int, groups: int, top_groups: int) -> None:
    """Raise `CheckpointError` unless `top_groups` of `groups` equal groups have enough experts of a token."""
    if num_experts % groups == 0 and top_groups <= groups and top_k <= num_experts // groups * top_groups:
        return
    what = f"{num_experts} experts, n_group {groups}, topk_group {top_groups} and num_experts_per_tok {top_k}"
    why = "a token chooses its experts in topk_group of n_group groups of the same size"
    raise CheckpointError(f"{what} do not fit", why, "download it again", code="model-config-not-valid")


def with_shared_experts(table: Mapping[str, Entry]) -> Mapping[str, Entry]:
    """Return `table` for layers whose experts have DeepSeek-V3's names, shared ones included."""
    expert, shared = "mlp.experts.{expert}.", f"{LAYER}mlp.shared_experts."
    routed = with_experts(
        table,
        (f"{expert}gate_proj.weight", f"{expert}up_proj.weight"),
        f"{expert}down_proj.weight",
        "mlp.gate.weight",
    )
    bias = Entry(ROUTER_BIAS, (f"{LAYER}mlp.gate.e_score_correction_bias",), "has_correction_bias")
    gate_up = Entry(
        SHARED_GATE_UP, (f"{shared}gate_proj.weight", f"{shared}up_proj.weight"), "has_shared_experts"
    )
    down = Entry(SHARED_DOWN, (f"{shared}down_proj.weight",), "has_shared_experts")
    return MappingProxyType(
        dict(routed)
        | {
            "mlp.router.expert_bias": bias,
            "mlp.shared_experts.linear_fc1.weight": gate_up,
            "mlp.shared_experts.linear_fc2.weight": down,
        }
    )
