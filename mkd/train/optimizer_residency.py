"""Keep optimizer state on the host between updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from torch import Tensor

from mkd.platform.host_memory import host_buffer, packed_bytes, packed_views

MAIN_PARAMETERS = ("fp32_from_float16_groups", "shard_fp32_from_float16_groups")
"""Attributes of Megatron's two bf16 optimizers that hold the fp32 main parameters."""


@dataclass(frozen=True)
class _Entry:
    """One tensor that moves: a moment of a parameter, or the fp32 main parameter itself."""

    parameter: Tensor
    moments: dict[str, Tensor] | None = None  # of the parameter; None: the entry is the parameter itself
    name: str = ""

    @property
    def key(self) -> tuple[int, str]:
        return id(self.parameter), self.name

    @property
    def tensor(self) -> Tensor:
        return self.parameter.data if self.moments is None else self.moments[self.name]

    def replace(self, tensor: Tensor) -> None:
        if self.moments is None:
            self.parameter.grad = None  # a gradient must be on its parameter's device
            self.parameter.data = tensor
        else:
            self.moments[self.name] = tensor


class OptimizerResidency:
    """Keeps the moments and the fp32 main parameters of Megatron's optimizers in host memory.

    Updates happen on the device. `on_device` copies the state to the device and back, bit for bit; every
    update, save and load runs inside it. The host never waits for a copy. Copies are queued on the compute
    stream. The state therefore takes the memory that the activations have just left, and the next forward
    pass may reuse that memory. Both happen in stream order, without an event. AdamW's `step` is small and
    stays where it is. So do fp32 parameters of the model itself, which have no main copy.
    """

    def __init__(self, optimizer: ChainedOptimizer, device: torch.device):
        self._optimizers = [inner for inner in optimizer.chained_optimizers if not inner.is_stub_optimizer]
        self._device = device
        self._homes: dict[tuple[int, str], Tensor] = {}  # host memory; Megatron replaces no parameter
        self._to_host()

    @property
    def host_bytes(self) -> int:
        """Size of the host memory."""
        return sum(home.nbytes for home in self._homes.values())

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Hold the whole state on the device inside the block, and on the host afterwards."""
        try:
            for entry in self._entries():
                arrived = torch.empty_like(entry.tensor, device=self._device)
                entry.replace(arrived.copy_(entry.tensor, non_blocking=True))
            yield
        finally:
            self._to_host()

    def _to_host(self) -> None:
        entries = self._entries()
        new = [entry for entry in entries if entry.key not in self._homes]
        tensors = [entry.tensor for entry in new]
        homes = packed_views(host_buffer(packed_bytes(tensors), self._device), tensors)
        self._homes.update({entry.key: home for entry, home in zip(new, homes, strict=True)})
        for entry in entries:
            entry.replace(self._homes[entry.key].copy_(entry.tensor, non_blocking=True))

    def _entries(self) -> list[_Entry]:
        """Return every tensor that moves. Moments exist from the first update or load."""
        return [entry for inner in self._optimizers for entry in _entries_of(inner)]


def _entries_of(inner: MegatronOptimizer) -> Iterator[_Entry]:
    for name in MAIN_PARAMETERS:
        for group in getattr(inner, name, ()):
            yield from map(_Entry, group)
    for parameter, moments in inner.optimizer.state.items():
        for name in moments:
            if name != "step":
                yield _Entry(parameter, moments, name)
