"""Decoder layers that multiply in FP8 while their model is trained.

Transformer Engine rounds weights, inputs and gradients in front of every product. It does so in a context.
Each layer enters it: a layer that is recomputed runs in backward, outside of the forward of its model, and
must round again. Evaluations and samples have the precision of the parameters, as exports do.

No weight is kept rounded for later micro-batches (`disable_parameter_transpose_cache` in
transformer_config.py). With Megatron's mark of a first micro-batch, Transformer Engine would keep them, and
would overwrite the gradients in `main_grad` in that micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import nn

Rounding = Callable[[], AbstractContextManager[None]]
"""Returns a context in which linear layers round what they multiply."""


def with_fp8_products(spec: TransformerBlockSubmodules, recipe: str) -> TransformerBlockSubmodules:
    """Return `spec` with layers that multiply in FP8 in training, with the scales of `recipe`."""
    rounding = training_rounding(recipe)
    layers = [replace(layer, module=_rounding(layer.module, rounding)) for layer in spec.layer_specs]
    return replace(spec, layer_specs=layers)


def _rounding(layer_class: type[nn.Module], rounding: Rounding) -> type[nn.Module]:
    class Fp8Layer(layer_class):
        def forward(self, *args: Any, **options: Any) -> Any:
            with rounding() if self.training else nullcontext():
                return super().forward(*args, **options)

    return Fp8Layer


def training_rounding(recipe: str) -> Rounding:
    """Return what makes the context of `--student-fp8-recipe`, in Transformer Engine's formats.

    `tensorwise`: E4M3, and E5M2 for gradients, with the largest value of each tensor as it is. `blockwise`:
    E4M3. Neither has a state that a checkpoint would have to keep.
    """
    from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling
    from transformer_engine.pytorch import autocast

    chosen = Float8BlockScaling() if recipe == "blockwise" else Float8CurrentScaling()
    return lambda: autocast(enabled=True, recipe=chosen)
