"""FP8 weights and products of Transformer Engine, by the scales that they have."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from mkd.models.fp8_weights import Fp8Recipe


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
