"""Keep a frozen model's decoder layers elsewhere, and bring them to the device one after another.

Two places hold them: host memory (`HostWeights`), and the memory of peers that run the same model on other
data (`PeerWeights`). `LayerStream` brings the layers, whatever their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mkd.models.language_model import LanguageModel
from mkd.models.placed.released_layers import released_like
from mkd.platform.host_memory import ALIGNMENT, host_buffer, packed_bytes, packed_views

LayerTensors = Callable[[nn.Module], Sequence[Tensor]]
"""Returns the tensors of a decoder layer that are elsewhere while it does not compute."""


def layer_parameters(layer: nn.Module) -> list[Tensor]:
    """Return all parameters of a decoder layer, in reverse order of registration.

    Megatron's buffers have this order, and weights of experts are neighbours in it (grouped_product.py).
    """
    return list(layer.parameters())[::-1]


class LayerWeights(Protocol):
    """The weights of one decoder layer, packed into one row of bytes, in another place."""

    nbytes: int  # bytes of a device buffer that `bring` writes
    kept_bytes: int  # bytes that this process keeps of them
    at_rest: list[Tensor]  # what the parameters are while the layer does not compute

    def store(self, packed: Tensor) -> None:
        """Take the weights from a device buffer, uint8 [nbytes]."""

    def bring(self, buffer: Tensor) -> None:
        """Queue the copy of the weights into a device buffer, uint8 [nbytes], on the current stream."""


class HostWeights:
    """Weights of one layer in page-locked host memory, where its parameters can be read at any time."""

    def __init__(self, parameters: Sequence[Tensor], device: torch.device):
        self._host = host_buffer(packed_bytes(parameters), device)
        self.nbytes = self.kept_bytes = self._host.nbytes
        self.at_rest = packed_views(self._host, parameters)

    def store(self, packed: Tensor) -> None:
        """Copy the weights to the host."""
        self._host.copy_(packed)

    def bring(self, buffer: Tensor) -> None:
        """Queue one copy from the host."""
        buffer.copy_(self._host, non_blocking=True)


class PeerWeights:
    """Weights of one layer, of which each process of a group keeps an equal part on its device.

    Every process of the group must store and bring the same layers in the same order. At rest the parameters
    have no values.
    """

    def __init__(self, parameters: Sequence[Tensor], group: dist.ProcessGroup):
        unit = ALIGNMENT * group.size()
        self.nbytes = -(-packed_bytes(parameters) // unit) * unit
        self.kept_bytes = self.nbytes // group.size()
        self.at_rest = [released_like(parameter) for parameter in parameters]
        self._group = group
        self._part: Tensor | None = None  # [kept_bytes] uint8

    def store(self, packed: Tensor) -> None:
        """Keep this process's part."""
        self._part = packed.chunk(self._group.size())[self._group.rank()].clone()

    def bring(self, buffer: Tensor) -> None:
        """Queue one all-gather over the group. It has no backward."""
        assert self._part is not None, "the layer has been loaded"
        dist.all_gather_into_tensor(buffer, self._part, group=self._group)


@dataclass(eq=False)
class _Slot:
    """Room for one layer on the device."""

    buffer: Tensor  # [bytes of the largest layer] uint8
    layer: _Layer | None = None  # the layer whose weights it holds once `loaded` has happened
    # Looked up late, because the CPU shim replaces it.
    loaded: torch.cuda.Event = field(default_factory=lambda: torch.cuda.Event())
    free: torch.cuda.Event = field(default_factory=lambda: torch.cuda.Event())  # its layer has computed


@dataclass(eq=False)
class _Layer:
    """One decoder layer: its parameters, and the place of their weights."""

    parameters: Sequence[Tensor]
    weights: LayerWeights
    on_device: dict[_Slot, list[Tensor]] = field(default_factory=dict)  # views of each slot's buffer

    def use(self, weights: list[Tensor]) -> None:
        for parameter, weight in zip(self.parameters, weights, strict=True):
            parameter.data = weight


class LayerStream:
    """Brings the decoder layers of one frozen teacher to the device, where two of them are at a time.

    While a layer computes, a side stream brings the next one. After the last layer of a model part it brings
    the first, for the next micro-batch. Embedding, final norm and head stay on the device. Parameters are
    views of a device buffer during their layer's forward, and `LayerWeights.at_rest` otherwise.

    Layers get their weights inside `loading`, one after another, so that the whole teacher is never on the
    device. After that nothing is allocated and no device is synchronised. Layers may run in any order, and
    each computes with its own weights: a wrong guess of the next one only costs time. On the CPU the same
    code makes plain copies.

    One instance serves the parts of all virtual stages of a teacher, which run in turns. Weights must not
    change after loading, and must be used without autograd.
    """

    def __init__(
        self,
        parts: Sequence[LanguageModel],
        device: torch.device,
        place: Callable[[Sequence[Tensor]], LayerWeights],  # makes room for one layer's weights
        tensors: LayerTensors,
    ):
        # Transformer Engine would keep its own converted weights, taken from whatever the buffer held at
        # first. Weights that are FP8 already (fp8_weights.py) are like others.
        assert not any(part.config.fp8 for part in parts), "weights that are converted cannot be streamed"
        modules = [list(part.decoder.layers) for part in parts]
        self._layers = {module: _build_layer(tensors(module), place) for own in modules for module in own}
        weights = [layer.weights for layer in self._layers.values()]
        self.kept_bytes = sum(one.kept_bytes for one in weights)
        largest = max((one.nbytes for one in weights), default=0)
        self._slots = [_Slot(torch.empty(largest, dtype=torch.uint8, device=device)) for _ in range(2)]
        self._latest = self._slots[0]  # the slot of the layer that runs, or ran last
        self._stream = torch.cuda.Stream(device)
        # The memory of the slots may have been in use until now.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        for layer in self._layers.values():
            layer.on_device = {slot: packed_views(slot.buffer, layer.parameters) for slot in self._slots}
        for own in modules:
            for module, following in zip(own, own[1:] + own[:1], strict=True):
                layer = self._layers[module]
                module.register_forward_pre_hook(partial(self._enter, layer, self._layers[following]))
                module.register_forward_hook(partial(self._leave, layer))

    @property
    def device_bytes(self) -> int:
        """Size of the buffers on the device."""
        return sum(slot.buffer.nbytes for slot in self._slots)

    @contextmanager
    def loading(self, module: nn.Module) -> Iterator[None]:
        """Give the decoder layer `module` device memory to be filled, and store its weights at the end.

        The parameters keep the values that they have. With `PeerWeights`, call it on all processes of the
        group, for the same layers.
        """
        layer, slot = self._layers[module], self._slots[0]
        slot.layer = None
        before = [parameter.data for parameter in layer.parameters]
        layer.use(layer.on_device[slot])
        for parameter, values in zip(layer.parameters, before, strict=True):
            parameter.data.copy_(values)
        del before
        yield
        layer.weights.store(slot.buffer[: layer.weights.nbytes])
        layer.use(layer.weights.at_rest)
        self._stream.wait_stream(torch.cuda.current_stream())

    def _enter(self, layer: _Layer, following: _Layer, module: nn.Module, args: tuple) -> None:
        """Wait for a layer's weights before it computes, and start to bring the next layer's."""
        slot = self._latest = self._bring(layer)
        torch.cuda.current_stream().wait_event(slot.loaded)
        layer.use(layer.on_device[slot])
        self._bring(following)

    def _leave(self, layer: _Layer, module: nn.Module, args: tuple, output: object) -> None:
        """Free a layer's slot as soon as the device has finished the queued work."""
        self._latest.free.record(torch.cuda.current_stream())
        layer.use(layer.weights.at_rest)

    def _bring(self, layer: _Layer) -> _Slot:
        """Return the slot that holds `layer`.

        If none does, bring it into the slot that is not the latest.
        """
        for slot in self._slots:
            if slot.layer is layer:
                return slot
        slot = next(slot for slot in self._slots if slot is not self._latest)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(slot.free)
            layer.weights.bring(slot.buffer[: layer.weights.nbytes])
            slot.loaded.record(self._stream)
        slot.layer = layer
        return slot


def _build_layer(tensors: Sequence[Tensor], place: Callable[[Sequence[Tensor]], LayerWeights]) -> _Layer:
    return _Layer(tensors, place(tensors))


def stream_from_host(
    parts: Sequence[LanguageModel], device: torch.device, tensors: LayerTensors = layer_parameters
) -> LayerStream:
    """Return the stream of a teacher whose layers are in host memory. UsageError if it cannot be locked."""
    return LayerStream(parts, device, partial(HostWeights, device=device), tensors)


def stream_from_peers(
    parts: Sequence[LanguageModel],
    device: torch.device,
    group: dist.ProcessGroup,
    tensors: LayerTensors = layer_parameters,
) -> LayerStream:
    """Return the stream of a teacher whose layers are split over `group`. Collective over the group.

    The processes of the group run the same parts of the teacher, each on its own data, and the same number of
    micro-batches.
    """
    # The communicator is made now: later, its memory would come on top of the peak.
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    return LayerStream(parts, device, partial(PeerWeights, group=group), tensors)
