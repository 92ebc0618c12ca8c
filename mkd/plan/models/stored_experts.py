"""Experts that a checkpoint stores as codes with scales, and that a teacher may keep so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mkd.families.layer_shape import MoEShape
from mkd.plan.models.model_shape import ModelShape

BLOCKS, MXFP4 = "FP8 blocks", "MXFP4"
BLOCK = 128
"""Rows and columns of a block that shares a scale, in the FP8 checkpoints that are kept."""

MXFP4_GROUP = 32
"""Elements of a row that share a scale of one byte."""


@dataclass(frozen=True)
class StoredExperts:
    """The form in which a checkpoint stores the matrices of its experts."""

    name: str
    why_not: str = ""  # why they cannot be kept; empty: they can

    @property
    def keeps_blocks(self) -> bool:
        """True if they are FP8 blocks that can be kept."""
        return self.name == BLOCKS and not self.why_not


def stored_experts(shape: ModelShape) -> StoredExperts | None:
    """Return how the experts of a model's Hugging Face folder are stored; None: without codes."""
    given = shape.hf_config.get("quantization_config")
    moe, config = shape.moe, given if isinstance(given, Mapping) else {}
    if moe is None or not config:
        return None
    if config.get("quant_method") == "mxfp4":
        return StoredExperts(MXFP4)
    if config.get("quant_method") == "fp8":
        return StoredExperts(BLOCKS, _why_no_blocks(moe, config))
    return None


def _why_no_blocks(moe: MoEShape, config: Mapping[str, Any]) -> str:
    block = config.get("weight_block_size")
    if block != [BLOCK, BLOCK]:
        return f"its scales are of blocks of {block}, not of {BLOCK} x {BLOCK} weights"
    if moe.is_gated and moe.ffn_hidden_size % BLOCK:
        return f"a block of gates, of which an expert has {moe.ffn_hidden_size}, would hold up projections"
    return ""


def matrix_weights(shape: ModelShape, moe: MoEShape) -> int:
    """Count the weights of an expert that are in matrices."""
    return moe.mlp_matrices * moe.expert_width(shape.hidden_size) * moe.ffn_hidden_size


def block_bytes(shape: ModelShape, moe: MoEShape) -> int:
    """Return the bytes of an expert's matrices in FP8, with a fp32 scale for each block."""
    width, ffn = (-(-size // BLOCK) for size in (moe.expert_width(shape.hidden_size), moe.ffn_hidden_size))
    return matrix_weights(shape, moe) + 4 * moe.mlp_matrices * width * ffn


def row_bytes(shape: ModelShape, moe: MoEShape) -> int:
    """Return the bytes of an expert's matrices in FP8, with a fp32 scale for each output channel."""
    channels = (moe.mlp_matrices - 1) * moe.ffn_hidden_size + moe.expert_width(shape.hidden_size)
    return matrix_weights(shape, moe) + 4 * channels


def mxfp4_bytes(shape: ModelShape, moe: MoEShape) -> int:
    """Return the bytes of an expert's matrices in MXFP4."""
    weights = matrix_weights(shape, moe)
    return weights // 2 + weights // MXFP4_GROUP
