"""The base of all places of a teacher's decoder layers, and the device as the simplest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mkd.errors import MkdError
from mkd.kinds.placed.choice import Choice
from mkd.plan.facts import RunFacts

if TYPE_CHECKING:  # they load torch
    from mkd.models.language_model import LanguageModel
    from mkd.models.placed.residency import LayerStream, LayerTensors
    from mkd.parallel.context import ParallelContext

STREAMED_LAYERS = 2
"""Layers that the device holds whole, wherever the others are: one computes while the next one arrives."""


class Place(Choice):
    """A place from which layers come to the device one after another, each before it computes."""

    streams: ClassVar[bool] = True  # False: layers are on the device all the time
    shares_base: ClassVar[bool] = False  # True: all of the teacher's weights are the student's

    @property
    def processes(self) -> int:
        """Number of processes that share every layer through a communicator; 1 if none do."""
        return 1

    def kept_bytes(self, nbytes: int) -> int:
        """Return the bytes on the device of the layers at rest, which have `nbytes` in all."""
        return 0

    def device_bytes(self, layers: Sequence[int]) -> int:
        """Return the bytes on the device of decoder layers with these bytes."""
        return self.kept_bytes(sum(layers)) + STREAMED_LAYERS * max(layers, default=0)

    @abstractmethod
    def transfer_ms(self, nbytes: int) -> float:
        """Return the time to bring a layer of that many bytes to the device."""

    def machine_problems(self, facts: RunFacts, index: int, processes: int) -> Iterable[MkdError]:
        """Yield what is wrong with the teacher of that number if each machine runs so many processes."""
        return ()

    @abstractmethod
    def stream(
        self, parts: Sequence[LanguageModel], context: ParallelContext, tensors: LayerTensors
    ) -> LayerStream | None:
        """Return what brings the layers of a teacher, whose weights are read afterwards. Collective.

        None: they stay on the device.
        """


@dataclass(frozen=True)
class DeviceMemory(Place):
    """Layers stay on the device."""

    name = "device"
    streams = False

    def device_bytes(self, layers: Sequence[int]) -> int:
        return sum(layers)

    def transfer_ms(self, nbytes: int) -> float:
        return 0.0

    def stream(self, parts: Sequence[LanguageModel], context: ParallelContext, tensors: LayerTensors) -> None:
        return None
