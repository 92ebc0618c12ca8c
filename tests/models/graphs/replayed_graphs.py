"""Stand-in for CUDA graphs on machines without a GPU: work that is carried out again when it is replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

import torch

from mkd.models.graphs import passes
from mkd.models.moe.balance import RouterRecord


@dataclass(eq=False)
class Again:
    """In place of a graph."""

    work: Callable[[], None]
    has_gradients: bool
    is_reset: bool = False

    def replay(self):
        self.work.__self__._given.packed.rows = None  # a graph computes again what mixers remember of a pack
        with torch.set_grad_enabled(self.has_gradients):
            self.work()

    def reset(self):
        self.is_reset = True


def recorded(work, pool, stream, generators):
    """Return work as a graph. A forward is carried out at once, for the tensors that it makes.

    Nothing of that is recorded by routers.
    """
    if work.__name__ != "_differentiate":
        with patch.object(RouterRecord, "add", lambda *given: None):
            work()
    return Again(work, torch.is_grad_enabled())


@contextmanager
def replayed_graphs() -> Iterator[None]:
    """Let passes be made inside the block."""
    device = dict(memory_reserved=lambda: 0, graph_pool_handle=lambda: None, synchronize=lambda: None)
    with (
        patch.object(passes, "recorded", recorded),
        patch.object(passes, "graph_safe_random_states", lambda: nullcontext([])),
        patch.multiple(torch.cuda, empty_cache=lambda: None, **device),
    ):
        yield


def graph_memory():
    """Return the memory of passes on a CPU."""
    from mkd.models.graphs.graph_memory import GraphMemory

    return GraphMemory(stream=None, scratch=None)


class Ready(SimpleNamespace):
    """In place of DDP: notes whose gradients are complete."""

    def before_forward(self):
        self.asked = True

    def after_backward(self, parameters):
        self.groups.append(list(parameters))
