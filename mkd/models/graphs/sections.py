"""The layers of a part in sections, each of which runs as a graph or without.

Most parts are one section. Two things cut a part: experts whose sizes the host must know, which run without a
graph between two sections; and, with data parallelism, the wish to reduce the gradients of the last layers
while those of the first are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import make_viewless_tensor
from torch import Tensor, nn

from mkd.models.graphs.layer_input import LayerInput
from mkd.models.moe.layer import ExpertLayer
from mkd.models.moe.split_layer import SplitLayer

HIDDEN = "hidden"
"""The residual stream, [t(/tp), 1, h], at every border of sections."""

READ_BY_EXPERTS = "normed", "weights", "selected"  # see `SplitLayer.before_experts`
T = TypeVar("T")
Tensors = dict[str, Tensor]  # what a section hands to the next one, by name
Work = Callable[[Tensors, LayerInput], Tensors]


@dataclass(frozen=True)
class Section:
    """Layers, or parts of them, that run together."""

    run: Work
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)  # trained ones, by name in the part


@dataclass(frozen=True)
class EagerSection:
    """Work between two graphs that cannot be in one."""

    run: Work
    reads: tuple[str, ...]  # what later sections do not get
    makes: Mapping[str, str]  # names of results -> the name of a tensor with the same shape and dtype

    def tensors_after(self, before: Mapping[str, T]) -> dict[str, T]:
        """Return what is handed on as it is."""
        return {name: value for name, value in before.items() if name not in self.reads}


def whole(part: TransformerBlock) -> Section:
    """Return all layers as one section, computed as the part does it."""
    return Section(partial(_run_part, part), _trained(part.named_parameters()))


def cut(
    part: TransformerBlock,
    at_experts: bool,
    most_layers: int | None = None,  # in a section; None: any number
) -> list[Section | EagerSection]:
    """Return the layers in sections. If `at_experts`, experts run between them, without a graph.

    The layers run one by one: without recomputation of whole layers, and without 8-bit arithmetic of
    Megatron's. `why_uncut` names what forbids a cut at experts.
    """
    assert part.config.recompute_granularity != "full", "the part itself recomputes whole layers"
    sections: list[Section | EagerSection] = []
    works: list[Work] = []
    parameters: dict[str, nn.Parameter] = {}
    own_layers = 0

    def close() -> None:
        nonlocal own_layers
        sections.append(Section(partial(_run_works, tuple(works)), dict(parameters)))
        works.clear()
        parameters.clear()
        own_layers = 0

    for index, layer in enumerate(part.layers):
        if own_layers == most_layers:
            close()
        own, name = layer.named_parameters, f"layers.{index}"
        own_layers += 1
        if at_experts and isinstance(layer.mlp, ExpertLayer):
            parameters.update(_trained(_without_experts(own(name))))
            works.append(partial(_before_experts, layer))
            close()
            made = {"routed": "normed"}
            sections.append(EagerSection(partial(_experts, layer.mlp), READ_BY_EXPERTS, made))
            works.append(partial(_after_experts, layer))
        else:
            parameters.update(_trained(own(name)))
            works.append(partial(_run_layer, layer))
    if part.final_layernorm is not None:
        parameters.update(_trained(part.final_layernorm.named_parameters("final_layernorm")))
        works.append(partial(_final_norm, part.final_layernorm))
    close()
    return sections


def why_uncut(part: TransformerBlock) -> str | None:
    """Return why the part cannot be cut at its experts; None: it can."""
    if part.config.recompute_granularity == "full":
        return "whole layers are recomputed, and the host waits for their experts"
    with_experts = [layer for layer in part.layers if isinstance(layer.mlp, ExpertLayer)]
    if any(layer.recompute_pre_mlp_layernorm or layer.mlp.moe_layer_recompute for layer in with_experts):
        return "experts or their norm are recomputed, and the host waits for the experts"
    if all(isinstance(layer, SplitLayer) and type(layer.mlp) is ExpertLayer for layer in with_experts):
        return None
    return "the host waits for experts with norms or widths of their own"


def _trained(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in parameters if parameter.requires_grad}


def _without_experts(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterable[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in parameters if ".mlp.experts." not in name)


def _run_part(part: TransformerBlock, tensors: Tensors, given: LayerInput) -> Tensors:
    hidden = tensors[HIDDEN]
    if not part.pre_process:
        part.set_input_tensor(hidden)
    output = part(
        hidden_states=hidden, attention_mask=None, rotary_pos_emb=given.angles, packed_seq_params=given.packed
    )
    return {HIDDEN: output}


def _run_works(works: Sequence[Work], tensors: Tensors, given: LayerInput) -> Tensors:
    for work in works:
        tensors = work(tensors, given)
    return tensors


def _run_layer(layer: nn.Module, tensors: Tensors, given: LayerInput) -> Tensors:
    output, _ = layer(
        hidden_states=tensors[HIDDEN],
        attention_mask=None,
        rotary_pos_emb=given.angles,
        packed_seq_params=given.packed,
    )
    return {HIDDEN: output}


def _before_experts(layer: SplitLayer, tensors: Tensors, given: LayerInput) -> Tensors:
    return layer.before_experts(tensors[HIDDEN], given.angles, given.packed)


def _experts(experts: ExpertLayer, tensors: Tensors, given: LayerInput) -> Tensors:
    return {"routed": experts.routed_output(*(tensors[name] for name in READ_BY_EXPERTS))}


def _after_experts(layer: SplitLayer, tensors: Tensors, given: LayerInput) -> Tensors:
    return {HIDDEN: layer.after_experts(tensors)}


def _final_norm(norm: nn.Module, tensors: Tensors, given: LayerInput) -> Tensors:
    return {HIDDEN: make_viewless_tensor(inp=norm(tensors[HIDDEN]), requires_grad=True, keep_graph=True)}
