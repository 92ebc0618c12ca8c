"""Decoder layers without memory: built one by one, each gives up its weights before the next is built.

A model part with such layers is never whole on the device. Something else gives them memory later.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn


def released_like(parameter: Tensor) -> Tensor:
    """Return a tensor with shape and dtype of `parameter` over one element: NaN, so that a use is noticed."""
    value = float("nan") if parameter.is_floating_point() else 0
    return parameter.new_full((1,), value).expand(parameter.shape)


def with_released_layers(spec: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Return `spec` with layers that give up the memory of their parameters as soon as they are built."""
    layers = [replace(layer, module=_released(layer.module)) for layer in spec.layer_specs]
    return replace(spec, layer_specs=layers)


def _released(layer_class: type[nn.Module]) -> type[nn.Module]:
    class ReleasedLayer(layer_class):
        def __init__(self, *args: object, **kwargs: object):
            super().__init__(*args, **kwargs)
            for parameter in self.parameters():
                parameter.data = released_like(parameter)

    return ReleasedLayer
