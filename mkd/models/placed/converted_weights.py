"""Weights of a frozen model that become others while they are read, one decoder layer after another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from mkd.platform.host_memory import packed_bytes, packed_views

LayerMemory = Callable[[nn.Module], AbstractContextManager[None]]
"""Returns the context in which the parameters of a decoder layer have memory to be filled."""

StoredCodes = tuple[Tensor, Tensor]
"""Codes and scales of one matrix, to be filled with what a file has: uint8 [out, ...], and [...]."""


class ConvertedWeights(ABC):
    """The decoder layers of one frozen model, whose weights are replaced inside `loading`.

    The layers must have been built without memory (`released_layers.py`): only one at a time has its weights
    in the precision of the model.
    """

    @abstractmethod
    def tensors(self, layer: nn.Module) -> list[Tensor]:
        """Return the tensors that a decoder layer keeps."""

    @abstractmethod
    def loaded_weights(self, layer: nn.Module) -> Sequence[nn.Parameter]:
        """Return the parameters of the layer that are filled first, and then replaced."""

    @abstractmethod
    def convert(self, layer: nn.Module) -> None:
        """Replace the layer's weights, which have been filled."""

    def stored_codes(self, parameter: Tensor) -> StoredCodes | None:
        """Return where the codes of a file belong that are kept as they are; None: `parameter` is filled."""
        return None

    @contextmanager
    def loading(self, layer: nn.Module, memory: LayerMemory | None = None) -> Iterator[None]:
        """Give the decoder layer memory to be filled, and convert its weights at the end.

        `memory` is that of `tensors` (default: they stay on the device). The weights have memory only here.
        """
        with (memory or self.on_device)(layer):
            if weights := self.loaded_weights(layer):
                buffer = torch.empty(packed_bytes(weights), dtype=torch.uint8, device=weights[0].device)
                for weight, values in zip(weights, packed_views(buffer, weights), strict=True):
                    weight.data = values
            yield
            self.convert(layer)

    @contextmanager
    def on_device(self, layer: nn.Module) -> Iterator[None]:
        """Give the tensors of a decoder layer memory of their own."""
        for tensor in self.tensors(layer):
            tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        yield
