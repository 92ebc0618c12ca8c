"""Deepstack (Qwen3-VL): the first decoder layers take features of inner blocks of the tower.

Feature j is added to the rows of image tokens after layer j. The features travel as Megatron's `context`, an
argument of every layer, so that recomputed layers get those of their own micro-batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class DeepstackLayer(TransformerLayer):
    """A layer behind which features are added; its index in the model is that of its feature."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return (hidden state [t(/tp), 1, h], `context`).

        `context` are the features [n, deepstack, h] of the rows that `packed_seq_params.image_rows` names;
        None without images.
        """
        hidden, context = super().forward(*args, **kwargs)
        if context is not None:
            rows, feature = kwargs["packed_seq_params"].image_rows, self.layer_number - 1
            hidden = hidden.index_add(0, rows, context[:, feature : feature + 1])
        return hidden, context


def with_deepstack(spec: TransformerBlockSubmodules, count: int) -> TransformerBlockSubmodules:
    """Return `spec` whose first `count` layers take features."""
    layers = list(spec.layer_specs)
    layers[:count] = [replace(layer, module=DeepstackLayer) for layer in layers[:count]]
    return replace(spec, layer_specs=layers)
