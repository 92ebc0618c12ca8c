"""Experts of latents: tokens are projected to few channels before the exchange, and back after it.

Router and shared experts see the hidden states. Source: Nemotron 3 (NVIDIA 2025); transformers,
`NemotronHMoE`. Megatron's own form needs Transformer Engine.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

from megatron.core.transformer import ModuleSpec, TransformerConfig
from torch import Tensor

from mkd.models.layer_parts import ReplicatedLinear
from mkd.models.moe.layer import ExpertLayer, TokenDispatcher


class LatentDispatcher(TokenDispatcher):
    """Exchanges latents of tokens."""

    down: ReplicatedLinear
    up: ReplicatedLinear

    def dispatch_preprocess(self, hidden_states: Tensor, *routing: Tensor) -> tuple[Tensor, ...]:
        """Return rows of latents for the experts of hidden states [t(/tp), 1, h]."""
        return super().dispatch_preprocess(self.down(hidden_states), *routing)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the sums of the experts' outputs as hidden states, [t(/tp), 1, h]."""
        return self.up(super().combine_postprocess(hidden_states))


class LatentExpertLayer(ExpertLayer):
    """A layer of experts with projections to the latents and back."""

    def __init__(self, config: TransformerConfig, *args: Any, latent_size: int, **options: Any):
        super().__init__(config, *args, **options)
        self.latent_down = ReplicatedLinear(config.hidden_size, latent_size, config)
        self.latent_up = ReplicatedLinear(latent_size, config.hidden_size, config)
        exchange = LatentDispatcher(
            self.num_local_experts,
            self.local_expert_indices,
            config=self.token_dispatcher.config,
            pg_collection=options["groups"],
        )
        exchange.down, exchange.up = self.latent_down, self.latent_up
        self.token_dispatcher = exchange


def with_latents(spec: ModuleSpec, latent_size: int) -> ModuleSpec:
    """Return the specification of a layer of experts, `spec`, with latents of so many channels."""
    experts = spec.submodules.experts
    experts = replace(experts, module=_of_width(experts.module, latent_size))
    return replace(
        spec,
        module=LatentExpertLayer,
        params=spec.params | {"latent_size": latent_size},
        submodules=replace(spec.submodules, experts=experts),
    )


@cache
def _of_width(experts: Any, width: int) -> type:
    """Return a subclass of `experts` whose inputs and outputs have so many channels."""

    def build(
        self: Any, num_local_experts: int, config: TransformerConfig, *args: Any, **options: Any
    ) -> None:
        config = copy(config)
        config.hidden_size = width
        experts.__init__(self, num_local_experts, config, *args, **options)

    return type(f"Latent{experts.__name__}", (experts,), {"__init__": build})
