"""Memory that the graphs of a process share. They run one after another, all on one stream."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from mkd.models.graphs.bounds import Bounds
from mkd.models.graphs.layer_input import LayerInput


class Graph(Protocol):
    """A CUDA graph."""

    def replay(self) -> None:
        """Start its work."""

    def reset(self) -> None:
        """Free it on the device."""


GraphT = TypeVar("GraphT", bound=Graph)


class SlotPass(Protocol):
    """Graphs of the layers of a part that is trained; see passes.py."""

    def fits(self) -> bool:
        """Return True if the graphs can still be used."""

    def run(self, given: LayerInput) -> Tensor:
        """Return the hidden state, [t(/tp), 1, h]."""


@dataclass(eq=False)
class GraphMemory:
    """The memory of all graphs.

    `scratch` holds what lives within one graph. What lives from the forward to the backward of a micro-batch
    is in a slot.
    """

    # Captures, and never runs a graph. Looked up late, because the CPU shim replaces it.
    stream: torch.cuda.Stream = field(default_factory=lambda: torch.cuda.Stream())
    scratch: Any = field(default_factory=lambda: torch.cuda.graph_pool_handle())
    slots: list[Slot] = field(default_factory=list)
    buffers: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)  # between sections of frozen layers
    kept_bytes: int = 0  # that torch has taken for graphs
    graphs: WeakSet[Graph] = field(default_factory=WeakSet)  # that exist

    def free_slot(self, example: Tensor) -> Slot:
        """Return a slot for a hidden state like `example`, [t(/tp), 1, h], that is not in use."""
        fitting = (one for one in self.slots if not one.in_use and one.shape == example.shape)
        slot = next(fitting, None)
        if slot is None:
            self.slots.append(slot := Slot(example))
        return slot

    def buffer(self, name: str, example: Tensor) -> Tensor:
        """Return the tensor like `example` that holds what frozen layers hand on by this name."""
        key = name, example.shape, example.dtype
        if key not in self.buffers:
            self.buffers[key] = torch.empty_like(example, requires_grad=False)
        return self.buffers[key]

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the memory that captures in the block take. Unused memory is given back first."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        yield
        self.kept_bytes += torch.cuda.memory_reserved() - before

    def noted(self, graph: GraphT) -> GraphT:
        """Return the graph, which `release` then frees."""
        self.graphs.add(graph)
        return graph

    def drop(self, part: nn.Module) -> None:
        """Drop the graphs of a part, and slots that are empty then. Slots in use stay."""
        for slot in self.slots:
            if not slot.in_use:
                slot.passes = {key: one for key, one in slot.passes.items() if key[0] is not part}
        self.slots[:] = [slot for slot in self.slots if slot.in_use or slot.passes]

    def renew_scratch(self) -> None:
        """Let later graphs share another pool: torch records nothing into one whose capture has failed."""
        self.scratch = torch.cuda.graph_pool_handle()

    def release(self) -> None:
        """Drop the slots, and free all graphs, whoever still refers to them.

        NCCL does not end a communicator while a graph has work of it.
        """
        self.slots.clear()
        self.buffers.clear()
        gc.collect()
        torch.cuda.synchronize()
        for graph in self.graphs:
            graph.reset()
        self.graphs.clear()


@dataclass(frozen=True)
class Border:
    """A tensor between two sections of layers that are trained, at a fixed address."""

    value: Tensor
    gradient: Tensor | None  # None: it has none


class Slot:
    """Memory of one micro-batch between its forward and its backward, and the graphs that use it.

    The graphs are those of different model parts, and of packs with different bounds. Only one of them is
    between its forward and its backward.
    """

    def __init__(self, example: Tensor):  # [t(/tp), 1, h]
        assert example.requires_grad, "the embedding is trained, so that backward reaches it"
        self.pool = torch.cuda.graph_pool_handle()
        self.shape, self.in_use = example.shape, False
        self.passes: dict[tuple[nn.Module, Bounds], SlotPass] = {}  # by part
        self._borders: dict[tuple[Any, ...], Border] = {}

    def border(self, place: int, name: str, example: Tensor) -> Border:
        """Return the border like `example` in front of section `place` of any part."""
        has_gradient = example.requires_grad
        key = place, name, example.shape, example.dtype, has_gradient
        if key not in self._borders:
            value = torch.empty_like(example, requires_grad=False)
            gradient = torch.empty_like(example, requires_grad=False) if has_gradient else None
            self._borders[key] = Border(value, gradient)
        return self._borders[key]
