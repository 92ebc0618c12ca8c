"""Experts as several families have them."""

from __future__ import annotations

from mkd.errors import CheckpointError, UsageError
from mkd.families.layer_shape import MoEShape


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
