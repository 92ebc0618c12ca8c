"""Keep the weights of a frozen model's linear layers in FP8, and run these layers in FP8.

Every linear layer of the decoder loses its parameter `weight`. A tensor of Transformer Engine takes its
place, whose values are in two plain tensors: data (one byte a weight) and scales. There is no other copy: a
frozen model has no backward, so no transpose is made. Because the two are plain tensors, `LayerStream` moves
them like parameters.

Embedding, norms, biases, attention, final norm and head stay in the precision of the model. The scales
are those of a recipe of Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mkd.models.language_model import LanguageModel
from mkd.models.placed.converted_weights import ConvertedWeights
from mkd.models.placed.released_layers import released_like

LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
"""Linear layers of a dense decoder layer."""


class Fp8Recipe(Protocol):
    """A way to scale FP8 numbers."""

    def scales_shape(self, weight: Tensor) -> Sequence[int]:
        """Return the shape of the fp32 scales of `weight` [out, in]."""

    def quantised(self, weight: Tensor, data: Tensor, scales: Tensor) -> Tensor:
        """Write FP8 values of `weight` [out, in] to `data`, uint8 [out, in], and their scales to `scales`.

        Return the tensor that takes the weight's place. It reads `data` and `scales` wherever their memory is
        when it is used.
        """

    def running(self) -> AbstractContextManager[None]:
        """Return the context in which linear layers round their input to FP8."""


@dataclass(eq=False)
class _Linear:
    """One linear layer and the two tensors of its weight."""

    module: nn.Module
    weight: nn.Parameter  # to be loaded; without memory before and after
    data: Tensor  # uint8 [out, in]
    scales: Tensor  # fp32

    @classmethod
    def build(cls, module: nn.Module, recipe: Fp8Recipe) -> _Linear:
        weight = module.weight
        scales = weight.new_empty((1,), dtype=torch.float32).expand(*recipe.scales_shape(weight))
        data = weight.new_empty((1,), dtype=torch.uint8).expand(weight.shape)
        return cls(module, weight, released_like(data), released_like(scales))

    def quantise(self, recipe: Fp8Recipe) -> None:
        quantised = recipe.quantised(self.weight.detach(), self.data, self.scales)
        self.weight.data = released_like(self.weight)  # the loader may still name it
        del self.module._parameters["weight"]
        self.module.weight = quantised


class Fp8Weights(ConvertedWeights):
    """The decoder layers of one frozen dense model, whose weights become FP8 inside `loading`."""

    def __init__(self, parts: Sequence[LanguageModel], recipe: Fp8Recipe):
        self._recipe = recipe
        self._layers = {
            layer: [_Linear.build(layer.get_submodule(name), recipe) for name in LINEARS]
            for part in parts
            for layer in part.decoder.layers
        }
        for part in parts:
            part.running_layers = recipe.running

    def tensors(self, layer: nn.Module) -> list[Tensor]:
        """Return the tensors that a decoder layer keeps: data and scales, and its other parameters."""
        linears = self._layers[layer]
        replaced = {linear.weight for linear in linears}
        kept = [parameter for parameter in layer.parameters() if parameter not in replaced]
        return kept + [tensor for linear in linears for tensor in (linear.data, linear.scales)]

    def loaded_weights(self, layer: nn.Module) -> list[nn.Parameter]:
        return [linear.weight for linear in self._layers[layer]]

    def convert(self, layer: nn.Module) -> None:
        for linear in self._layers[layer]:
            linear.quantise(self._recipe)


class TensorwiseRecipe:
    """One scale for a weight or an activation, from its largest value (current scaling)."""

    def __init__(self) -> None:
        from transformer_engine.common.recipe import Float8CurrentScaling, Format

        self._recipe = Float8CurrentScaling(fp8_format=Format.E4M3)

    def scales_shape(self, weight: Tensor) -> Sequence[int]:
        return (1,)

    def quantised(self, weight: Tensor, data: Tensor, scales: Tensor) -> Tensor:
        from transformer_engine.pytorch.tensor.float8_tensor import (
            Float8CurrentScalingQuantizer,
            Float8Tensor,
        )

        fp8 = _e4m3()
        quantizer = Float8CurrentScalingQuantizer(fp8, weight.device, rowwise=True, columnwise=False)
        tensor = Float8Tensor(
            shape=weight.shape,
            dtype=weight.dtype,
            data=data,
            fp8_scale_inv=scales,
            fp8_dtype=fp8,
            quantizer=quantizer,
        )
        return quantizer.update_quantized(weight, tensor)

    def running(self) -> AbstractContextManager[None]:
        return _autocast(self._recipe)


class BlockwiseRecipe:
    """A scale for 128 x 128 weights, and for 128 channels of a token. Scales are powers of two."""

    def __init__(self) -> None:
        from transformer_engine.common.recipe import Float8BlockScaling, Format
        from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

        self._recipe = Float8BlockScaling(fp8_format=Format.E4M3)
        self._quantizer = Float8BlockQuantizer(_e4m3(), rowwise=True, columnwise=False, block_scaling_dim=2)

    def scales_shape(self, weight: Tensor) -> Sequence[int]:
        return self._quantizer.get_scale_shape(weight.shape, columnwise=False)

    def quantised(self, weight: Tensor, data: Tensor, scales: Tensor) -> Tensor:
        from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor

        tensor = Float8BlockwiseQTensor(
            shape=weight.shape,
            dtype=weight.dtype,
            rowwise_data=data,
            rowwise_scale_inv=scales,
            columnwise_data=None,
            columnwise_scale_inv=None,
            fp8_dtype=_e4m3(),
            quantizer=self._quantizer.copy(),
            is_2D_scaled=True,
        )
        return self._quantizer.update_quantized(weight, tensor)

    def running(self) -> AbstractContextManager[None]:
        return _autocast(self._recipe)


def fp8_recipe(name: str) -> Fp8Recipe:
    """Return the recipe of `--teacher-fp8-recipe`."""
    if name == "blockwise":
        return BlockwiseRecipe()
    assert name == "tensorwise", name
    return TensorwiseRecipe()


def _e4m3() -> Any:
    import transformer_engine_torch as kernels

    return kernels.DType.kFloat8E4M3


def _autocast(recipe: Any) -> AbstractContextManager[None]:
    """Return the context, entered once for all layers: one a layer costs CPU time."""
    from transformer_engine.pytorch import autocast

    return autocast(enabled=True, recipe=recipe)
