"""Products in FP8: teachers, packs and layouts whose products Transformer Engine can make, and their cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mkd.config.schema import Config, TeacherConfig
from mkd.errors import UsageError
from mkd.families.layer_shape import LayerShape
from mkd.kinds.placed.choice import flag_of
from mkd.kinds.placed.precision import Precision
from mkd.plan.facts import RunFacts
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.parameters import product_parameters
from mkd.plan.parallel_sizes import Sizes

if TYPE_CHECKING:  # they load torch
    from mkd.models.language_model import LanguageModel
    from mkd.models.placed.fp8_weights import Fp8Weights

PRODUCT_TIME = {"tensorwise": 0.63, "blockwise": 0.70}
"""FP8 recipe -> time of a teacher's forward without attention over that in bf16.

Measured on one H200 with 8 layers of a Qwen3-8B-shaped teacher and 8,192 tokens (Transformer Engine 2.11):
44.5 ms in bf16, 28.8 tensorwise and 32.0 blockwise, of which attention is 2.0 ms.
"""

ROWS, WIDTHS = 8, 16
"""Multiples of the tokens and of the channels that an FP8 product takes, in Transformer Engine."""

BLOCK = 128
"""Rows and columns of weights, and channels of a token, with one scale in the blockwise recipe.

A multiple of it is needed in both if sequence parallelism gathers activations with such scales.
"""

LENGTH_UNIT = 64
"""Multiple of the length of packs that follows from the data (mkd/data/aligned/teacher_pieces.py)."""


@dataclass(frozen=True)
class Fp8(Precision):
    """Transformer Engine rounds weights and inputs of products to FP8. Everything else stays in bf16."""

    fp8_recipe: str

    name = "fp8"
    title = "FP8"
    converts = True
    input_bytes = 1

    @classmethod
    def compared(cls) -> Iterable[tuple[str, Mapping[str, Any]]]:
        yield cls.name, {}

    @property
    def product_time(self) -> float:
        return PRODUCT_TIME[self.fp8_recipe]

    def layer_bytes(self, shape: ModelShape, layer: LayerShape, sizes: Sizes, element: int) -> int:
        fp8 = product_parameters(shape, layer, sizes)
        scales = 4 * fp8 // BLOCK**2 if self.fp8_recipe == "blockwise" else 0
        whole = super().layer_bytes(shape, layer, sizes, element)
        return fp8 + scales + whole - fp8 * element

    def label(self, bf16: bool) -> str:
        return f"fp8 {self.fp8_recipe}"

    def rounding(self, scores: str) -> str:
        return f"; {scores} of layers in FP8 (E4M3, {self.fp8_recipe} scales)"

    def weights(self, parts: Sequence[LanguageModel]) -> Fp8Weights:
        from mkd.models.placed.fp8_weights import Fp8Weights, fp8_recipe

        return Fp8Weights(parts, fp8_recipe(self.fp8_recipe))

    def problems(self, facts: RunFacts, index: int) -> Iterator[UsageError]:
        """Yield problems: bf16 besides the products, packs of a fitting length, dense layers that fit."""
        config, given = facts.config, flag_of(index, "precision")
        if not config.training.bf16:
            why = "everything but the products stays in bf16, and the run is in fp32"
            yield UsageError(
                f"{given} fp8 without --bf16", why, f"add --bf16, or remove {given}", code="add-flag"
            )
        gathers_blocks = self._gathers_blocks(config)
        yield from _check_rows(config, config.teachers[index], given, BLOCK if gathers_blocks else ROWS)
        for model in facts.models:
            if model.teacher == index:
                width = BLOCK if gathers_blocks else WIDTHS
                yield from _check_shape(config, f"{given} fp8", model.shape, width)

    def _gathers_blocks(self, config: Config) -> bool:
        """Return True if tensor-parallel processes gather activations with scales of blocks."""
        parallel = config.parallel
        is_sharded = parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1
        return is_sharded and self.fp8_recipe == "blockwise"

    def device_problems(self) -> Iterator[UsageError]:
        from mkd.platform.fp8_support import fp8_problems

        return fp8_problems({self.fp8_recipe})


def _check_rows(config: Config, teacher: TeacherConfig, given: str, rows: int) -> Iterator[UsageError]:
    """Check that the tokens of a process in front of a product are a multiple of `rows`."""
    parallel, packs = config.parallel, config.training.micro_batch_size
    sizes = Sizes.of(parallel)
    length, label = config.training.seq_length, "--seq-length"
    if teacher.xtoken is not None:
        known = teacher.xtoken.seq_length
        length, label = known or LENGTH_UNIT * sizes.document_multiple, "the teacher's xtoken seq_length"
    multiple = rows * (sizes.row if parallel.sequence_parallel else sizes.context)
    if packs * length % multiple:
        shared = f"context-parallel-size {sizes.context}"
        shared += f" x tensor-model-parallel-size {sizes.tensor}" if parallel.sequence_parallel else ""
        unit = multiple // math.gcd(packs, multiple)
        yield UsageError(
            f"{given} fp8: {label} {length} x micro-batch-size {packs} over {shared} is not a "
            f"multiple of {rows} tokens",
            "FP8 products take only such numbers of rows",
            f"use {label} {unit * math.ceil(length / unit)}",
            code="length-not-divisible",
        )


def _check_shape(config: Config, place: str, shape: ModelShape, hidden: int) -> Iterator[UsageError]:
    """Check one teacher, whose hidden size has to be a multiple of `hidden`."""
    do = f"remove {place}: --teacher-residency peers or host saves memory, too"
    if shape.moe is not None:
        what, why = f"{place}, but the teacher has experts", "FP8 products of experts are not supported yet"
        yield UsageError(what, why, do, code="fp8-not-possible")
    elif any(layer.mla is not None for layer in shape.layers):
        what = f"{place}, but the teacher has latent attention"
        yield UsageError(what, "its FP8 products are not supported yet", do, code="fp8-not-possible")
    elif not all(layer.is_transformer_layer for layer in shape.layers):
        what = f"{place}, but not all layers of the teacher have attention and an MLP"
        yield UsageError(what, "FP8 products of others are not supported yet", do, code="fp8-not-possible")
    elif any(layer.heads is not None for layer in shape.layers):
        what = f"{place}, but the teacher's layers differ in their heads"
        yield UsageError(what, "their FP8 products have not been tried", do, code="fp8-not-possible")
    else:
        tensor = config.parallel.tensor_model_parallel_size
        widths = sorted(width for width in _widths(shape, tensor) if width % WIDTHS)
        if not widths and shape.hidden_size % hidden:
            what = (
                f"{place} with blockwise scales and sequence parallelism, but hidden size {shape.hidden_size}"
            )
            why = f"blocks of activations have {hidden} channels"
            do = "use --teacher-fp8-recipe tensorwise"
            yield UsageError(what, why, do, code="fp8-not-possible")
        if widths:
            given = ", ".join(map(str, widths))
            what = f"{place}, but weights of the teacher have {given} channels on a process"
            why = f"FP8 products take multiples of {WIDTHS}"
            do = f"{do}; a smaller --tensor-model-parallel-size may fit" if tensor > 1 else do
            yield UsageError(what, why, do, code="fp8-not-possible")


def _widths(shape: ModelShape, tensor: int) -> set[int]:
    """Return the channels of the weights of one process."""
    groups = shape.padded_query_groups(tensor) // tensor
    query, key_value = groups * shape.heads_per_group * shape.head_dim, groups * shape.head_dim
    widths = {shape.hidden_size, query, query + 2 * key_value}
    return widths | {layer.ffn_hidden_size // tensor for layer in shape.layers}
