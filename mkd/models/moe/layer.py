"""The MLP of a layer with experts: route, exchange tokens, compute, exchange back; and its specification."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

from megatron.core.extensions import transformer_engine as te
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor, nn

from mkd.families.layer_shape import MoEShape
from mkd.models.moe.experts import ExpertRowLinear, GroupedExperts, LocalExperts
from mkd.models.moe.router import DocumentRouter, ScaledRouter


class TokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all over the expert-parallel group, with sizes as lists.

    Newer versions of torch refuse the arrays that Megatron hands over. A process with all experts exchanges
    nothing: tokens are in the order of experts, and the host does not wait for their counts.
    """

    @property
    def has_all_experts(self) -> bool:
        return bool(self.ep_size == self.tp_size == 1)

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Any:
        if self.has_all_experts:
            return tokens_per_expert
        result = super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)
        if point == self.cuda_sync_point:  # before it, copies from the GPU may be under way
            self.input_splits: Any = _as_list(self.input_splits)
            self.output_splits: Any = _as_list(self.output_splits)
        return result

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> tuple[Tensor, ...]:
        if not self.has_all_experts:
            return super().dispatch_postprocess(global_input_tokens, global_probs)
        counts: Any = self.tokens_per_expert
        self.tokens_per_expert: Any = None
        return global_input_tokens, counts, global_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states if self.has_all_experts else super().combine_preprocess(hidden_states)


def _as_list(sizes: Any) -> Any:
    is_on_host = hasattr(sizes, "tolist") and not getattr(sizes, "is_cuda", False)
    return sizes.tolist() if is_on_host else sizes


class ExpertLayer(MoELayer):
    """Megatron's layer of experts, whose routers get the documents of the tokens."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        groups: ProcessGroupCollection,
        has_biases: bool,
        layer_number: int | None = None,
        **unused: Any,
    ):
        """Build it for the experts of `groups`; versions of Megatron differ in what else they hand over.

        `has_biases`: router and experts have biases, whether attention has some or not.
        """
        if config.add_bias_linear != has_biases:
            config = copy(config)
            config.add_bias_linear = has_biases
        super().__init__(config, submodules, layer_number, groups)
        device = next(self.experts.parameters()).device
        self.router.to(device)  # Megatron builds it on the CPU, and the gate of shared experts too
        if self.shared_experts is not None:
            self.shared_experts.to(device)
        self.token_dispatcher = TokenDispatcher(
            self.num_local_experts, self.local_expert_indices, config=config, pg_collection=groups
        )

    def forward(
        self,
        hidden_states: Tensor,  # [t(/tp), 1, h]
        intermediate_tensors: object = None,
        padding_mask: Tensor | None = None,  # see `token_documents`
    ) -> tuple[Tensor, None]:
        """Return the output [t(/tp), 1, h], and None for a bias."""
        assert intermediate_tensors is None, "no part of the layer is captured"
        if self.moe_layer_recompute and self.training:
            return checkpoint(self._compute, False, hidden_states, padding_mask), None
        return self._compute(hidden_states, padding_mask), None

    @property
    def host_waits(self) -> bool:
        """True if the host must know how many tokens the experts have before these can compute."""
        return not (self.token_dispatcher.has_all_experts and self.experts.is_one_product)

    def _compute(self, hidden_states: Tensor, documents: Tensor | None) -> Tensor:
        shared = self.shared_output(hidden_states)
        weights, selected = self.router(hidden_states, documents)
        output = self.routed_output(hidden_states, weights, selected)
        return output if shared is None else output + shared

    def shared_output(self, hidden_states: Tensor) -> Tensor | None:
        """Return the output of the experts that every token passes, [t(/tp), 1, h]; None without them."""
        return self.shared_experts(hidden_states) if self.use_shared_expert else None

    def routed_output(self, hidden_states: Tensor, weights: Tensor, selected: Tensor) -> Tensor:
        """Return the output of the chosen experts, [t(/tp), 1, h]; see `DocumentRouter.routing`."""
        exchange = self.token_dispatcher
        tokens, weights = exchange.dispatch_preprocess(hidden_states, selected, weights)
        tokens, weights = exchange.token_dispatch(tokens, weights)
        tokens, counts, weights = exchange.dispatch_postprocess(tokens, weights)
        output, bias = self.experts(tokens, counts, weights)
        assert bias is None, "experts add their biases themselves"
        output = exchange.token_combine(exchange.combine_preprocess(output))
        output = exchange.combine_postprocess(output)
        exchange.probs = exchange.routing_map = None  # else the graph, and with it the model, stays in memory
        exchange.reversed_local_input_permutation_mapping = None
        return output


NORMS = ("shared_input_norm", "shared_output_norm", "expert_input_norm", "expert_output_norm", "output_norm")


class NormedExpertLayer(ExpertLayer):
    """Takes the residual itself: the MLP and the experts normalise their inputs and outputs, then the sum.

    Source: transformers, `Gemma4TextDecoderLayer`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        groups: ProcessGroupCollection,
        norm: type[nn.Module],
        **options: Any,
    ):
        super().__init__(config, submodules, groups, **options)
        for name in NORMS:
            made = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
            self.add_module(name, made)

    def _compute(self, hidden_states: Tensor, documents: Tensor | None) -> Tensor:
        shared = self.shared_output_norm(self.shared_experts(self.shared_input_norm(hidden_states)))
        weights, selected = self.router(hidden_states, documents)
        routed = self.routed_output(self.expert_input_norm(hidden_states), weights, selected)
        return self.output_norm(shared + self.expert_output_norm(routed))


@dataclass(frozen=True)
class ExpertParts:
    """The modules that a layer's experts are made of."""

    experts: type
    linears: MLPSubmodules  # of one expert, or of all in one product
    shared_linears: MLPSubmodules  # of the MLP that every token passes


LOCAL_EXPERTS = ExpertParts(
    LocalExperts,
    MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=ExpertRowLinear),
    MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
)
TRANSFORMER_ENGINE_EXPERTS = ExpertParts(
    GroupedExperts,
    MLPSubmodules(linear_fc1=te.TEColumnParallelGroupedLinear, linear_fc2=te.TERowParallelGroupedLinear),
    MLPSubmodules(linear_fc1=te.TEColumnParallelLinear, linear_fc2=te.TERowParallelLinear),
)


def moe_spec(
    moe: MoEShape, parts: ExpertParts, groups: ProcessGroupCollection | None, norm: type[nn.Module]
) -> ModuleSpec:
    """Return the module in place of a layer's MLP.

    `groups` travel with the specification, because Megatron's layer hands them to its own classes only.
    """
    shared = ModuleSpec(module=SharedExpertMLP, submodules=parts.shared_linears)
    params = {"groups": groups, "has_biases": moe.biases}
    return ModuleSpec(
        module=NormedExpertLayer if moe.inner_norms else ExpertLayer,
        params=params | {"norm": norm} if moe.inner_norms else params,
        submodules=MoESubmodules(
            router=ScaledRouter if moe.inner_norms else DocumentRouter,
            experts=ModuleSpec(module=parts.experts, submodules=parts.linears),
            shared_experts=shared if moe.shared_ffn_hidden_size else None,
        ),
    )
