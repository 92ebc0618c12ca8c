"""A model of transformers with which mkd's is compared."""

from __future__ import annotations

from torch import nn


def one_expert_at_a_time(model: nn.Module) -> None:
    """Let transformers compute experts in a loop: its grouped products refuse some widths."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
