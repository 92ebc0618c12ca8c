"""Specification of a layer's experts."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.extensions import transformer_engine as te
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from mkd.families.layer_shape import MoEShape
from mkd.models.moe.experts import ExpertRowLinear, GroupedExperts, LocalExperts
from mkd.models.moe.layer import ExpertLayer
from mkd.models.moe.router import DocumentRouter


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


def moe_spec(moe: MoEShape, parts: ExpertParts, groups: ProcessGroupCollection | None) -> ModuleSpec:
    """Return the module in place of a layer's MLP.

    `groups` travel with the specification, because Megatron's layer hands them to its own classes only.
    """
    shared = ModuleSpec(module=SharedExpertMLP, submodules=parts.shared_linears)
    return ModuleSpec(
        module=ExpertLayer,
        params={"groups": groups, "has_biases": moe.biases},
        submodules=MoESubmodules(
            router=DocumentRouter,
            experts=ModuleSpec(module=parts.experts, submodules=parts.linears),
            shared_experts=shared if moe.shared_ffn_hidden_size else None,
        ),
    )
