"""The base of all precisions of the products in a teacher's decoder layers, which is that of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mkd.errors import MkdError
from mkd.families.layer_shape import LayerShape
from mkd.kinds.placed.choice import Choice
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.parameters import layer_parameters
from mkd.plan.parallel_sizes import Sizes

if TYPE_CHECKING:  # they load torch
    from mkd.models.language_model import LanguageModel
    from mkd.models.placed.converted_weights import ConvertedWeights


@dataclass(frozen=True)
class Precision(Choice):
    """The precision of the run: bf16, or fp32 without --bf16."""

    name = "bf16"
    converts: ClassVar[bool] = False  # True: `weights` replaces parameters
    input_bytes: ClassVar[int] = 0  # bytes of each input of a product that it makes in its own precision
    decoded_bytes: ClassVar[float] = 0  # moved for each weight of experts that is decoded before a product

    @classmethod
    def compared(cls) -> Iterable[tuple[str, Mapping[str, Any]]]:
        yield "", {}

    def product_time(self, shape: ModelShape) -> float:
        """Return the time of the layers' products over the time in the run's precision."""
        return 1.0

    def layer_bytes(self, shape: ModelShape, layer: LayerShape, sizes: Sizes, element: int) -> int:
        """Return the bytes of a layer on one process. `element`: bytes of a weight in the run's precision."""
        return layer_parameters(shape, layer, sizes).total * element

    def label(self, bf16: bool) -> str:
        """Return the precision as the description of stored predictions has it."""
        return "bf16" if bf16 else "fp32"

    def rounding(self, scores: str) -> str:
        """Return what it changes in the `scores` of a teacher, for the loss card."""
        return ""

    def device_problems(self, has_experts: bool) -> Iterable[MkdError]:
        """Yield why the devices of this machine cannot compute in it. It may load torch."""
        return ()

    def weights(self, parts: Sequence[LanguageModel], has_files: bool) -> ConvertedWeights | None:
        """Return what converts the weights of a teacher, which are read afterwards; None: nothing does.

        `has_files`: they are read from a Hugging Face folder.
        """
        return None
