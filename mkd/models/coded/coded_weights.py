"""Keep the weights of a frozen model's routed experts as codes with scales.

Everything else in the model stays in its precision: attention, router, shared experts and dense layers, which
are 2 to 10 % of the weights of released models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor, nn

from mkd.models.coded.coded_experts import CodedExperts
from mkd.models.coded.coded_product import CodedStack
from mkd.models.coded.number_codes import Codes
from mkd.models.language_model import LanguageModel
from mkd.models.moe.experts import numbered
from mkd.models.moe.layer import ExpertLayer
from mkd.models.placed.converted_weights import ConvertedWeights, StoredCodes
from mkd.models.placed.released_layers import released_like

LINEARS = "linear_fc1", "linear_fc2"


@dataclass(eq=False)
class _Matrices:
    """One of the two products of a layer's experts: the parameters to be loaded, and what replaces them."""

    weights: list[nn.Parameter]  # of each expert; without memory before and after
    biases: list[nn.Parameter]
    stack: CodedStack

    @classmethod
    def build(cls, experts: nn.Module, linear: str, form: Codes, has_biases: bool) -> _Matrices:
        weights = _of_experts(experts, linear, "weight")
        size, (rows, columns) = len(weights), weights[0].shape
        codes = weights[0].new_empty((1,), dtype=torch.uint8)
        scales = weights[0].new_empty((1,), dtype=form.scale_dtype)
        stack = CodedStack(
            form,
            rows,
            columns,
            released_like(codes.expand(size, *form.codes_shape(rows, columns))),
            released_like(scales.expand(size, *form.scales_shape(rows, columns))),
        )
        return cls(weights, _of_experts(experts, linear, "bias") if has_biases else [], stack)

    def encode(self) -> None:
        """Write the codes of weights that have been loaded."""
        stack = self.stack
        for weight, codes, scales in zip(self.weights, stack.codes, stack.scales, strict=True):
            stack.form.encode(weight.detach(), codes, scales)

    def release(self) -> None:
        """Take the memory from the weights; the loader may still name them."""
        for weight in self.weights:
            weight.data = released_like(weight)


def _of_experts(experts: nn.Module, linear: str, kind: str) -> list[nn.Parameter]:
    """Return the parameters of this kind, one for each expert."""
    if isinstance(experts, TEGroupedMLP):
        return numbered(getattr(experts, linear), kind, experts.num_local_experts)
    return [getattr(getattr(expert, linear), kind) for expert in experts.local_experts]


class CodedWeights(ConvertedWeights):
    """The decoder layers of one frozen model, whose routed experts get codes inside `loading`.

    With `keeps_files`, a checkpoint has codes of the same form, which are kept as they are.
    """

    def __init__(self, parts: Sequence[LanguageModel], form: Codes, keeps_files: bool):
        self._keeps_files = keeps_files
        self._layers: dict[nn.Module, list[_Matrices]] = {}
        self._places: dict[Tensor, tuple[CodedStack, int]] = {}  # of a matrix in its stack
        for part in parts:
            for layer in part.decoder.layers:
                self._layers[layer] = self._matrices(layer, form)
        for both in self._layers.values():
            for one in both:
                self._places |= {weight: (one.stack, index) for index, weight in enumerate(one.weights)}

    def _matrices(self, layer: nn.Module, form: Codes) -> list[_Matrices]:
        if not isinstance(layer.mlp, ExpertLayer):
            return []
        experts = layer.mlp.experts
        has_biases = experts.config.add_bias_linear
        return [_Matrices.build(experts, linear, form, has_biases) for linear in LINEARS]

    def tensors(self, layer: nn.Module) -> list[Tensor]:
        """Return the tensors that a decoder layer keeps: codes and scales, and its other parameters."""
        kept = [parameter for parameter in layer.parameters() if parameter not in self._places]
        stacks = [one.stack for one in self._layers[layer]]
        return kept + [tensor for stack in stacks for tensor in (stack.codes, stack.scales)]

    def loaded_weights(self, layer: nn.Module) -> list[nn.Parameter]:
        if self._keeps_files:
            return []
        return [weight for one in self._layers[layer] for weight in one.weights]

    def stored_codes(self, parameter: Tensor) -> StoredCodes | None:
        if not self._keeps_files or parameter not in self._places:
            return None
        stack, expert = self._places[parameter]
        return stack.codes[expert], stack.scales[expert]

    def convert(self, layer: nn.Module) -> None:
        if not (both := self._layers[layer]):
            return
        for one in both:
            if not self._keeps_files:
                one.encode()
            one.release()
        first, second = both
        config = layer.mlp.experts.config
        layer.mlp.experts = CodedExperts(config, first.stack, second.stack, first.biases, second.biases)
