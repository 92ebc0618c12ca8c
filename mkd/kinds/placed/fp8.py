"""Products in FP8: teachers, packs and layouts whose products Transformer Engine can make, and their cost.

In a teacher with experts only these multiply in FP8, by products of mkd's own (`fp8_experts.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mkd.config.schema import Config, TeacherConfig
from mkd.errors import UsageError
from mkd.families.layer_shape import LayerShape
from mkd.kinds.fp8_limits import BLOCK, Fp8Products
from mkd.kinds.placed import fp8_experts
from mkd.kinds.placed.choice import flag_of
from mkd.kinds.placed.precision import Precision
from mkd.plan.facts import RunFacts
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.parameters import product_parameters
from mkd.plan.models.stored_experts import block_bytes, row_bytes
from mkd.plan.parallel_sizes import Sizes

if TYPE_CHECKING:  # they load torch
    from mkd.models.language_model import LanguageModel
    from mkd.models.placed.converted_weights import ConvertedWeights

PRODUCT_TIME = {"tensorwise": 0.63, "blockwise": 0.70}
"""FP8 recipe -> time of a teacher's forward without attention over that in bf16.

Measured on one H200 with 8 layers of a Qwen3-8B-shaped teacher and 8,192 tokens (Transformer Engine 2.11):
44.5 ms in bf16, 28.8 tensorwise and 32.0 blockwise, of which attention is 2.0 ms.
"""

EXPERT_BYTES = {"tensorwise": row_bytes, "blockwise": block_bytes}
"""FP8 recipe -> the function that returns the bytes of an expert's matrices."""

ROWS = 8
"""Multiple of the tokens that an FP8 product of a forward takes, in Transformer Engine."""

LENGTH_UNIT = 64
"""Multiple of the length of packs that follows from the data (mkd/data/aligned/teacher_pieces.py)."""


@dataclass(frozen=True)
class Fp8(Precision):
    """Weights and inputs of products are rounded to FP8. Everything else stays in bf16."""

    fp8_recipe: str

    name = "fp8"
    title = "FP8"
    converts = True
    input_bytes = 1

    @classmethod
    def compared(cls) -> Iterable[tuple[str, Mapping[str, Any]]]:
        yield cls.name, {}

    def product_time(self, shape: ModelShape) -> float:
        if shape.moe is not None:
            return fp8_experts.product_time(self.fp8_recipe, shape)
        return PRODUCT_TIME[self.fp8_recipe]

    def layer_bytes(self, shape: ModelShape, layer: LayerShape, sizes: Sizes, element: int) -> int:
        if shape.moe is not None:
            of_expert = EXPERT_BYTES[self.fp8_recipe]
            whole = super().layer_bytes(shape, layer, sizes, element)
            return whole + fp8_experts.saved_bytes(shape, layer, sizes, element, of_expert)
        fp8 = product_parameters(shape, layer, sizes)
        scales = 4 * fp8 // BLOCK**2 if self.fp8_recipe == "blockwise" else 0
        whole = super().layer_bytes(shape, layer, sizes, element)
        return fp8 + scales + whole - fp8 * element

    def label(self, bf16: bool) -> str:
        return f"fp8 {self.fp8_recipe}"

    def rounding(self, scores: str) -> str:
        return f"; {scores} of layers in FP8 (E4M3, {self.fp8_recipe} scales)"

    def weights(self, parts: Sequence[LanguageModel], has_files: bool) -> ConvertedWeights:
        from mkd.models.placed.fp8_weights import Fp8Weights, fp8_recipe

        if parts[0].shape.moe is not None:
            return fp8_experts.weights(parts, self.fp8_recipe, has_files)
        return Fp8Weights(parts, fp8_recipe(self.fp8_recipe))

    def problems(self, facts: RunFacts, index: int) -> Iterator[UsageError]:
        """Yield problems: bf16 besides the products, packs of a fitting length, dense layers that fit."""
        config, given = facts.config, flag_of(index, "precision")
        if not config.training.bf16:
            why = "everything but the products stays in bf16, and the run is in fp32"
            yield UsageError(
                f"{given} fp8 without --bf16", why, f"add --bf16, or remove {given}", code="add-flag"
            )
        products = self._products(index)
        shape = next((model.shape for model in facts.models if model.teacher == index), None)
        if shape is not None and shape.moe is not None:
            yield from products.expert_problems(shape, shape.moe)
            return
        yield from self._row_problems(config, config.teachers[index], products)
        if shape is not None:
            yield from products.shape_problems(config, shape)

    def _products(self, index: int) -> Fp8Products:
        given, do = flag_of(index, "precision"), "--teacher-residency peers or host saves memory, too"
        given = f"{given} fp8"
        return Fp8Products("teacher", given, self.fp8_recipe, f"remove {given}: {do}")

    def _row_problems(
        self, config: Config, teacher: TeacherConfig, products: Fp8Products
    ) -> Iterator[UsageError]:
        length, label = config.training.seq_length, "--seq-length"
        if teacher.has_own_row:
            known = teacher.own_seq_length
            length, label = (
                known or LENGTH_UNIT * Sizes.of(config.parallel).document_multiple,
                f"the teacher's {'context' if teacher.xtoken is None else 'xtoken'} seq_length",
            )
        yield from products.row_problems(config, length, label, ROWS)

    def device_problems(self, has_experts: bool) -> Iterable[UsageError]:
        """Experts have mkd's own products, which any machine computes, be it slowly."""
        from mkd.platform.fp8_support import fp8_problems

        return () if has_experts else fp8_problems({self.fp8_recipe})
