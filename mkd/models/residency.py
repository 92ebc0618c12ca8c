"""Keep a frozen model's decoder layers in host memory, and bring them to the device one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from mkd.models.language_model import LanguageModel
from mkd.platform.host_memory import host_buffer, packed_bytes, packed_views


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
    """One decoder layer: its parameters, and their weights on the host.

    The weights are packed, so that one copy moves them all.
    """

    parameters: list[nn.Parameter]
    host: Tensor  # [bytes] uint8
    on_host: list[Tensor]  # views of `host`, one for each parameter
    on_device: dict[_Slot, list[Tensor]] = field(default_factory=dict)  # views of each slot's buffer

    @classmethod
    def moved_to_host(cls, module: nn.Module, device: torch.device) -> _Layer:
        """Move the weights of `module` from the device to the host."""
        parameters = list(module.parameters())
        host = host_buffer(packed_bytes(parameters), device)
        on_host = packed_views(host, parameters)
        for parameter, weight in zip(parameters, on_host, strict=True):
            weight.copy_(parameter.data)
            parameter.data = weight
        return cls(parameters, host, on_host)

    def use(self, weights: list[Tensor]) -> None:
        for parameter, weight in zip(self.parameters, weights, strict=True):
            parameter.data = weight


class HostResidency:
    """Keeps the decoder layers of one frozen teacher in host memory, two of them on the device at a time.

    While a layer computes, a side stream copies the next one. After the last layer of a model part it copies
    the first, for the next micro-batch. Embedding, final norm and head stay on the device. Parameters are
    views of a device buffer during their layer's forward, and views of host memory otherwise.

    After construction nothing is allocated and no device is synchronised. Layers may run in any order, and
    each computes with its own weights: a wrong guess of the next one only costs time. On the CPU the same
    code makes plain copies.

    Build it when the weights are loaded: the layers then leave the device one by one. For a moment the whole
    teacher is on the device, before gradients and optimizer state exist. One instance serves the parts of all
    virtual stages of a teacher, which run in turns. Weights must not change afterwards, and must be used
    without autograd.
    """

    def __init__(self, parts: Sequence[LanguageModel], device: torch.device):
        # With fp8, Transformer Engine keeps its own converted weights, taken from whatever the buffer held at
        # first.
        assert not any(part.config.fp8 for part in parts), "fp8 weights cannot be streamed from the host"
        layers = [[_Layer.moved_to_host(module, device) for module in part.decoder.layers] for part in parts]
        sizes = [layer.host.nbytes for own in layers for layer in own]
        torch.cuda.empty_cache()
        self.host_bytes = sum(sizes)
        self._slots = [
            _Slot(torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device)) for _ in range(2)
        ]
        self._latest = self._slots[0]  # the slot of the layer that runs, or ran last
        self._stream = torch.cuda.Stream(device)
        # The memory of the slots may have been in use until now.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        for part, own in zip(parts, layers, strict=True):
            for module, layer, following in zip(part.decoder.layers, own, own[1:] + own[:1], strict=True):
                layer.on_device = {slot: packed_views(slot.buffer, layer.parameters) for slot in self._slots}
                module.register_forward_pre_hook(partial(self._enter, layer, following))
                module.register_forward_hook(partial(self._leave, layer))

    @property
    def device_bytes(self) -> int:
        """Size of the buffers on the device."""
        return sum(slot.buffer.nbytes for slot in self._slots)

    def _enter(self, layer: _Layer, following: _Layer, module: nn.Module, args: tuple) -> None:
        """Wait for a layer's weights before it computes, and start the copy of the next layer's."""
        slot = self._latest = self._bring(layer)
        torch.cuda.current_stream().wait_event(slot.loaded)
        layer.use(layer.on_device[slot])
        self._bring(following)

    def _leave(self, layer: _Layer, module: nn.Module, args: tuple, output: object) -> None:
        """Free a layer's slot as soon as the device has finished the queued work."""
        self._latest.free.record(torch.cuda.current_stream())
        layer.use(layer.on_host)

    def _bring(self, layer: _Layer) -> _Slot:
        """Return the slot that holds `layer`.

        If none does, queue the copy into the slot that is not the latest.
        """
        for slot in self._slots:
            if slot.layer is layer:
                return slot
        slot = next(slot for slot in self._slots if slot is not self._latest)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(slot.free)
            slot.buffer[: layer.host.nbytes].copy_(layer.host, non_blocking=True)
            slot.loaded.record(self._stream)
        slot.layer = layer
        return slot
