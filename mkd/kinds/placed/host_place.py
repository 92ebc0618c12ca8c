"""Decoder layers in page-locked host memory of every process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mkd.kinds.placed.place import Place
from mkd.plan.times.hardware import HOST_BYTES_PER_MS

if TYPE_CHECKING:  # they load torch
    from mkd.models.language_model import LanguageModel
    from mkd.models.placed.residency import LayerStream, LayerTensors
    from mkd.parallel.context import ParallelContext


@dataclass(frozen=True)
class HostMemory(Place):
    """The device keeps no layer at rest."""

    name = "host"

    def transfer_ms(self, nbytes: int) -> float:
        return nbytes / HOST_BYTES_PER_MS

    def stream(
        self, parts: Sequence[LanguageModel], context: ParallelContext, tensors: LayerTensors
    ) -> LayerStream:
        from mkd.models.placed.residency import stream_from_host

        return stream_from_host(parts, context.device, tensors)
