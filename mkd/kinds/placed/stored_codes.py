"""Experts whose weights stay as their checkpoint stores them: in FP8 blocks or MXFP4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mkd.errors import UsageError
from mkd.families.layer_shape import LayerShape
from mkd.kinds.placed.choice import flag_of
from mkd.kinds.placed.fp8_experts import saved_bytes
from mkd.kinds.placed.precision import Precision
from mkd.plan.facts import RunFacts
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.stored_experts import MXFP4, block_bytes, mxfp4_bytes, stored_experts
from mkd.plan.parallel_sizes import Sizes

if TYPE_CHECKING:  # they load torch
    from mkd.models.coded.coded_weights import CodedWeights
    from mkd.models.language_model import LanguageModel


@dataclass(frozen=True)
class StoredCodes(Precision):
    """Products are those of the run's precision: each decodes the matrices of a layer's experts first."""

    name = "stored"
    converts = True
    decoded_bytes = 3  # a byte is read, and two are written

    @classmethod
    def compared(cls) -> Iterable[tuple[str, Mapping[str, Any]]]:
        yield cls.name, {}

    def layer_bytes(self, shape: ModelShape, layer: LayerShape, sizes: Sizes, element: int) -> int:
        whole, stored = super().layer_bytes(shape, layer, sizes, element), stored_experts(shape)
        of_expert = mxfp4_bytes if stored is not None and stored.name == MXFP4 else block_bytes
        return whole + saved_bytes(shape, layer, sizes, element, of_expert)

    def weights(self, parts: Sequence[LanguageModel], has_files: bool) -> CodedWeights:
        from mkd.models.coded.coded_weights import CodedWeights
        from mkd.models.coded.number_codes import BlockCodes, MXFP4Codes

        stored = stored_experts(parts[0].shape)
        assert has_files and stored is not None, "`problems` reports it"
        return CodedWeights(parts, MXFP4Codes() if stored.name == MXFP4 else BlockCodes(), keeps_files=True)

    def problems(self, facts: RunFacts, index: int) -> Iterator[UsageError]:
        """Yield why the teacher has nothing that could stay as it is stored."""
        shape = next((model.shape for model in facts.models if model.teacher == index), None)
        if shape is None:
            return
        stored, why = stored_experts(shape), ""
        if shape.moe is None:
            why = "only experts can keep the form of their checkpoint, and the teacher has none"
        elif facts.config.teachers[index].load:
            why = "Megatron checkpoints have unquantised weights"
        elif stored is None:
            why = "config.json names neither FP8 with blocks of weights nor MXFP4"
        elif stored.why_not:
            why = stored.why_not
        if why:
            given = f"{flag_of(index, 'precision')} stored"
            do = f"remove it, or use {flag_of(index, 'precision')} fp8"
            yield UsageError(f"{given} is not possible", why, do, code="fp8-not-possible")
