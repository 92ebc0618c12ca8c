"""Experts in FP8: how much memory and time it saves, and their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mkd.families.layer_shape import LayerShape, MoEShape
from mkd.kinds.fp8_limits import BLOCK
from mkd.plan.models.flops import layer_matmul_parameters
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.stored_experts import matrix_weights, stored_experts
from mkd.plan.parallel_sizes import Sizes

if TYPE_CHECKING:  # they load torch
    from mkd.models.coded.coded_weights import CodedWeights
    from mkd.models.language_model import LanguageModel

EXPERT_TIME = {"tensorwise": 0.92, "blockwise": 1.38}
"""FP8 recipe -> time of the products of experts over that in bf16, inputs rounded included.

Measured on one H100 with a layer of Qwen3-30B-A3B and 8,192 tokens (torch 2.11): 1.04 ms in bf16, 0.96
tensorwise and 1.44 blockwise.
"""


def saved_bytes(
    shape: ModelShape,
    layer: LayerShape,
    sizes: Sizes,
    element: int,
    bytes_of_expert: Callable[[ModelShape, MoEShape], int],  # its matrices as codes and scales
) -> int:
    """Return how much more memory a layer takes than in the run's precision: a number below 0."""
    if layer.moe is None:
        return 0
    own = bytes_of_expert(shape, layer.moe) - matrix_weights(shape, layer.moe) * element
    return layer.moe.num_experts // sizes.expert * own


def product_time(recipe: str, shape: ModelShape) -> float:
    """Return the time of all products over that in bf16, of which only the experts' change."""
    routed = sum(layer.moe.top_k * matrix_weights(shape, layer.moe) for layer in shape.layers if layer.moe)
    share = routed / sum(layer_matmul_parameters(shape, layer) for layer in shape.layers)
    return 1 - share * (1 - EXPERT_TIME[recipe])


def weights(parts: Sequence[LanguageModel], recipe: str, has_files: bool) -> CodedWeights:
    """Return what makes the experts' weights FP8; blocks that files have stay as they are."""
    from mkd.models.coded.coded_weights import CodedWeights
    from mkd.models.coded.number_codes import BlockCodes, RowCodes

    if recipe == "tensorwise":
        return CodedWeights(parts, RowCodes(input_group=0), keeps_files=False)
    stored = stored_experts(parts[0].shape)
    keeps = has_files and stored is not None and stored.keeps_blocks
    return CodedWeights(parts, BlockCodes(input_group=BLOCK), keeps)
