"""Limits of products in FP8: numbers of tokens and widths that Transformer Engine takes, and dense layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from mkd.config.schema import Config
from mkd.errors import UsageError
from mkd.families.layer_shape import MoEShape
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.parallel_sizes import Sizes

WIDTHS = 16
"""Multiple of the channels that an FP8 product takes, in Transformer Engine."""

BLOCK = 128
"""Rows and columns of weights, and channels of a token, with one scale in the blockwise recipe.

A multiple of it is needed in both if sequence parallelism gathers activations with such scales.
"""


@dataclass(frozen=True)
class Fp8Products:
    """The FP8 products of a model, as its settings ask for them."""

    role: str  # teacher or student
    given: str  # setting that asks for them, as messages name it
    recipe: str
    remedy: str  # of a model that cannot have them

    def row_problems(self, config: Config, length: int, label: str, rows: int) -> Iterator[UsageError]:
        """Check that the tokens of a process in front of a product are a multiple of `rows`.

        `length`: tokens of a pack. `label`: the setting that says so.
        """
        parallel, packs, sizes = config.parallel, config.training.micro_batch_size, Sizes.of(config.parallel)
        rows = BLOCK if self._gathers_blocks(config) else rows
        multiple = rows * (sizes.row if parallel.sequence_parallel else sizes.context)
        if packs * length % multiple:
            shared = f"context-parallel-size {sizes.context}"
            shared += f" x tensor-model-parallel-size {sizes.tensor}" if parallel.sequence_parallel else ""
            unit = multiple // math.gcd(packs, multiple)
            yield UsageError(
                f"{self.given}: {label} {length} x micro-batch-size {packs} over {shared} is not a "
                f"multiple of {rows} tokens",
                "FP8 products take only such numbers of rows",
                f"use {label} {unit * math.ceil(length / unit)}",
                code="length-not-divisible",
            )

    def shape_problems(self, config: Config, shape: ModelShape) -> Iterator[UsageError]:
        """Check the layers of the model, and their widths on a process."""
        what, why = self._of_layers(shape)
        if what:
            yield UsageError(f"{self.given}, but {what}", why, self.remedy, code="fp8-not-possible")
            return
        tensor = config.parallel.tensor_model_parallel_size
        widths = sorted(width for width in _widths(shape, tensor) if width % WIDTHS)
        if widths:
            what = f"weights of the {self.role} have {', '.join(map(str, widths))} channels on a process"
            do = self.remedy
            do = f"{do}; a smaller --tensor-model-parallel-size may fit" if tensor > 1 else do
            why = f"FP8 products take multiples of {WIDTHS}"
            yield UsageError(f"{self.given}, but {what}", why, do, code="fp8-not-possible")
        elif self._gathers_blocks(config) and shape.hidden_size % BLOCK:
            what = f"{self.given} with blockwise scales and sequence parallelism, "
            what += f"but hidden size {shape.hidden_size}"
            do = f"use --{self.role}-fp8-recipe tensorwise"
            why = f"blocks of activations have {BLOCK} channels"
            yield UsageError(what, why, do, code="fp8-not-possible")

    def expert_problems(self, shape: ModelShape, moe: MoEShape) -> Iterator[UsageError]:
        """Check the widths of experts, which no process cuts."""
        own = {moe.expert_width(shape.hidden_size), moe.ffn_hidden_size}
        if widths := sorted(width for width in own if width % WIDTHS):
            what = f"{self.given}, but experts of the {self.role} have {', '.join(map(str, widths))} channels"
            why = f"FP8 products take multiples of {WIDTHS}"
            yield UsageError(what, why, self.remedy, code="fp8-not-possible")

    def _of_layers(self, shape: ModelShape) -> tuple[str, str]:
        """Return what in the layers cannot have FP8 products, and why; two empty strings if nothing."""
        layers = shape.layers
        if shape.moe is not None:
            return f"the {self.role} has experts", "FP8 products of experts are not supported yet"
        if any(layer.mla is not None for layer in layers):
            return f"the {self.role} has latent attention", "its FP8 products are not supported yet"
        if not all(layer.is_transformer_layer for layer in layers):
            what = f"not all layers of the {self.role} have attention and an MLP"
            return what, "FP8 products of others are not supported yet"
        if any(layer.heads is not None for layer in layers):
            return f"the {self.role}'s layers differ in their heads", "their FP8 products have not been tried"
        return "", ""

    def _gathers_blocks(self, config: Config) -> bool:
        """Return True if tensor-parallel processes gather activations with scales of blocks."""
        parallel = config.parallel
        is_sharded = parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1
        return is_sharded and self.recipe == "blockwise"


def _widths(shape: ModelShape, tensor: int) -> set[int]:
    """Return the channels of the weights of one process."""
    groups = shape.padded_query_groups(tensor) // tensor
    query, key_value = groups * shape.heads_per_group * shape.head_dim, groups * shape.head_dim
    widths = {shape.hidden_size, query, query + 2 * key_value}
    return widths | {layer.ffn_hidden_size // tensor for layer in shape.layers}
